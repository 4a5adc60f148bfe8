"""Tokens of real text, read in an order that depends on seed and position alone."""

from trainwright.integration.data.choice import DataChoice
from trainwright.integration.data.corpus import Corpus, read_corpus
from trainwright.integration.data.dataset import Data, Dataset
from trainwright.integration.data.mixture import Mixture, Turns
from trainwright.integration.data.ngram import NgramBaseline, fit_ngrams
from trainwright.integration.data.orders import Shuffled
from trainwright.integration.data.packing import WholeDocuments
from trainwright.integration.data.preparation import known_vocabulary, open_data, prepare_data
from trainwright.integration.data.protocol import Samples, Sequence, Sequences
from trainwright.integration.data.reader import Batch, Reader, Rows, spread
from trainwright.integration.data.shifting import IGNORE, labels_of, ordinals_of
from trainwright.integration.data.stream import Stream
from trainwright.integration.data.tokenizer import ByteTokenizer, Tokenizer
from trainwright.integration.data.tokens import Tokens

__all__ = [
    "IGNORE",
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "Data",
    "DataChoice",
    "Dataset",
    "Mixture",
    "NgramBaseline",
    "Reader",
    "Rows",
    "Samples",
    "Sequence",
    "Sequences",
    "Shuffled",
    "Stream",
    "Tokenizer",
    "Tokens",
    "Turns",
    "WholeDocuments",
    "fit_ngrams",
    "known_vocabulary",
    "labels_of",
    "open_data",
    "ordinals_of",
    "prepare_data",
    "read_corpus",
    "spread",
]
