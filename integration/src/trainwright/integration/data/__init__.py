"""Bytes of real text, read in an order that depends on seed and position alone."""

from trainwright.integration.data.corpus import Corpus, default_source, read_corpus
from trainwright.integration.data.ngram import NgramBaseline, fit_ngrams
from trainwright.integration.data.reader import IGNORE, Batch, Reader

__all__ = [
    "IGNORE",
    "Batch",
    "Corpus",
    "NgramBaseline",
    "Reader",
    "default_source",
    "fit_ngrams",
    "read_corpus",
]
