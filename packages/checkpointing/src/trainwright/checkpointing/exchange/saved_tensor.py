"""What the pickles of `torch.save` may name, and what this package makes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from trainwright.checkpointing.errors import UntrustedError

from .pickles import Maker
from .showing import show

_MAX_ELEMENTS = 2**62


@attrs.frozen
class Storage:
    """What a persistent id of the pickle names; ``dtype`` is None where it is bytes."""

    key: str
    dtype: torch.dtype | None
    num_bytes: int


@attrs.frozen
class SavedTensor:
    """A tensor of the pickle: elements of a storage."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool


@attrs.frozen
class _StorageType:
    dtype: torch.dtype | None


def find_storage(told: Any) -> Storage:
    """Return what a persistent id of the pickle names.

    Raises:
        ValueError: It names no storage.
    """
    kind, of, key, _, count = told
    if kind != "storage" or type(of) is not _StorageType or not isinstance(key, str):
        raise ValueError("a persistent id that names no storage")
    if type(count) is not int or not 0 <= count < _MAX_ELEMENTS:
        raise ValueError("a storage of no sensible size")
    itemsize = 1 if of.dtype is None else of.dtype.itemsize
    return Storage(key, of.dtype, count * itemsize)


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, *more: Any
) -> SavedTensor:
    if type(storage) is not Storage or hooks or len(more) > 2:
        raise ValueError("a tensor of no storage, or with hooks")
    dtype = more[0] if more and isinstance(more[0], torch.dtype) else storage.dtype
    extra = next((item for item in more if isinstance(item, dict)), {})
    if dtype is None or not set(extra) <= {"conj", "neg"}:
        raise ValueError("a tensor of no dtype, or with unknown properties")
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or not all(
        type(n) is int and 0 <= n < _MAX_ELEMENTS for n in numbers
    ):
        raise ValueError("a tensor of no sensible shape")
    if math.prod(max(n, 1) for n in shape) > _MAX_ELEMENTS:  # also of a shape with a 0 in it
        raise ValueError("a tensor of too many elements")
    is_conj, is_neg = bool(extra.get("conj")), bool(extra.get("neg"))
    return SavedTensor(storage, dtype, offset, tuple(shape), tuple(stride), is_conj, is_neg)


def _parameter(tensor: Any, *_: Any) -> SavedTensor:
    if type(tensor) is not SavedTensor:
        raise ValueError("a parameter of no tensor")
    return tensor


def _encoded(text: str = "", encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise UntrustedError(f"bytes in the encoding {show(encoding)}")
    return text.encode("latin1")


def _dictionary(items: Any = ()) -> dict[Any, Any]:
    if items != () and items != []:
        raise ValueError("a dictionary with items before it was made")
    return {}


def _set(items: Any = ()) -> set[Any]:
    if not all(isinstance(item, (str, int, float, bytes, type(None))) for item in items):
        raise ValueError("a set of what cannot be in one")
    return set(items)


def _size(sizes: Any = ()) -> tuple[int, ...]:
    if not all(type(size) is int and 0 <= size < _MAX_ELEMENTS for size in sizes):
        raise ValueError("a size that is none")
    return tuple(sizes)


def dtypes_by_name() -> dict[str, torch.dtype]:
    """Return every dtype of PyTorch by the name under which a pickle asks for it."""
    return {
        f"torch {name}": value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    }


_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}
PLAIN: Mapping[str, Any] = {
    "collections OrderedDict": Maker(_dictionary),
    "torch Size": Maker(_size),
    "_codecs encode": Maker(_encoded),
    "__builtin__ bytes": Maker(_encoded),
    "builtins bytes": Maker(_encoded),
    "__builtin__ set": Maker(_set),
    "builtins set": Maker(_set),
    **dtypes_by_name(),
}
ADMITTED: Mapping[str, Any] = {
    **PLAIN,
    **{f"torch {name}Storage": _StorageType(dtype) for name, dtype in _STORAGES.items()},
    "torch.storage UntypedStorage": _StorageType(None),
    "torch._utils _rebuild_tensor_v2": Maker(_tensor),
    "torch._utils _rebuild_tensor_v3": Maker(_tensor),
    "torch._utils _rebuild_parameter": Maker(_parameter),
}
