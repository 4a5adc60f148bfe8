"""Checkpoints of others: PyTorch DCP folders and Hugging Face safetensors, in and out."""

from .dcp import open_dcp
from .dcp_writing import write_dcp
from .huggingface import open_huggingface
from .huggingface_writing import WrittenFolder, write_huggingface
from .lazy import LazyObject, LazyTensor, Source

__all__ = [
    "LazyObject",
    "LazyTensor",
    "Source",
    "WrittenFolder",
    "open_dcp",
    "open_huggingface",
    "write_dcp",
    "write_huggingface",
]
