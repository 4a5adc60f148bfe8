"""Checkpoints of others: PyTorch DCP folders and Hugging Face safetensors, in and out."""

from .conversion import (
    Imported,
    import_source,
    to_dcp,
    to_huggingface,
    to_store,
)
from .dcp import open_dcp
from .dcp_writing import write_dcp
from .huggingface import open_huggingface
from .huggingface_writing import WrittenFolder, write_huggingface
from .lazy import LazyObject, LazyTensor, Source

__all__ = [
    "Imported",
    "LazyObject",
    "LazyTensor",
    "Source",
    "WrittenFolder",
    "import_source",
    "open_dcp",
    "open_huggingface",
    "to_dcp",
    "to_huggingface",
    "to_store",
    "write_dcp",
    "write_huggingface",
]
