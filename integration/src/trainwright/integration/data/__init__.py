"""Tokens of real text, read in an order that depends on seed and position alone."""

from trainwright.integration.data.corpus import Corpus, default_source, read_corpus
from trainwright.integration.data.ngram import NgramBaseline, fit_ngrams
from trainwright.integration.data.orders import Shuffled
from trainwright.integration.data.protocol import Samples, Sequence, Sequences
from trainwright.integration.data.reader import Batch, Reader, Rows, spread
from trainwright.integration.data.shifting import IGNORE, labels_of, ordinals_of
from trainwright.integration.data.stream import Stream

__all__ = [
    "IGNORE",
    "Batch",
    "Corpus",
    "NgramBaseline",
    "Reader",
    "Rows",
    "Samples",
    "Sequence",
    "Sequences",
    "Shuffled",
    "Stream",
    "default_source",
    "fit_ngrams",
    "labels_of",
    "ordinals_of",
    "read_corpus",
    "spread",
]
