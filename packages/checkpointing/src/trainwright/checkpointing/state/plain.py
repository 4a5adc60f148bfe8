"""Plain values as JSON, so that they come back equal in value and type without pickle."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from trainwright.checkpointing.errors import TreeError

MAX_DEPTH = 100
_FLOAT = "__float__"
_TUPLE = "__tuple__"
_SIZE = "__size__"
_ITEMS = "__items__"
_COUNTER = "__counter__"
_DTYPE = "__dtype__"
_NUMPY = "__numpy__"
_TAGS = frozenset({_FLOAT, _TUPLE, _SIZE, _ITEMS, _COUNTER, _DTYPE, _NUMPY})

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_NUMPY_TYPES = frozenset(np.dtype(code).newbyteorder("<").str for code in "?bhiqBHIQefdFD")
_HINTS: tuple[tuple[str, str], ...] = (
    ("state_dict", "store what its state_dict() returns"),
    ("get_state", "store what its get_state() returns"),
    ("_fields", "write tuple(value), or a dictionary of its fields"),
    ("__members__", "write the enum member's name or value"),
    ("isdisjoint", "write sorted(value)"),
    ("move_to_end", "write dict(value)"),
    ("__attrs_attrs__", "write a dictionary of its fields"),
    ("__dataclass_fields__", "write a dictionary of its fields"),
)


def encode_plain(path: str, value: Any, depth: int = 0) -> Any:
    """Return ``value`` as JSON can hold it exactly; what JSON has no type for becomes an object.

    ``depth`` is in how many others it lies.

    Raises:
        TreeError: The value is of a type that would not come back.
    """
    check_depth(path, depth)
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if kind in (list, tuple, torch.Size):
        items = [encode_plain(f"{path}[{n}]", item, depth + 1) for n, item in enumerate(value)]
        return items if kind is list else {_TUPLE if kind is tuple else _SIZE: items}
    if kind in (dict, collections.Counter):
        return _encode_dict(path, value, depth + 1)
    if kind is torch.dtype:
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, np.generic) and value.dtype.newbyteorder("<").str in _NUMPY_TYPES:
        stored = np.asarray(value).astype(value.dtype.newbyteorder("<"))
        return {_NUMPY: [stored.dtype.str, stored.tobytes().hex()]}
    hint = next((f"; {hint}" for name, hint in _HINTS if hasattr(kind, name)), "")
    raise TreeError(
        f"{path}: only tensors, Sharded, numpy arrays and numbers, None and plain bool, int, "
        "float, str, list, tuple, dict, torch.dtype can be stored, got "
        f"{kind.__module__}.{kind.__qualname__}{hint}"
    )


def check_depth(path: str, depth: int) -> None:
    """Raise TreeError for what is nested deeper than a load from any function could unpack.

    A load takes up to four times as many calls as a save, and must not fail for that.
    """
    if depth > MAX_DEPTH:
        where = path if len(path) <= 80 else f"{path[:80]}..."
        raise TreeError(
            f"{where}: the state is nested too deeply, or holds itself; at most {MAX_DEPTH} "
            "dictionaries and lists may lie in each other"
        )


def decode_plain(value: Any) -> Any:
    """Return what `encode_plain` was given.

    Raises:
        ValueError: It has not made this value.
    """
    if isinstance(value, list):
        return [decode_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAGS.isdisjoint(value):
        return {key: decode_plain(item) for key, item in value.items()}
    ((tag, content),) = value.items() if len(value) == 1 else ((_FLOAT, None),)
    try:
        return _DECODERS[tag](content)
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise ValueError(f"{str(value)[:200]} is no plain value") from error


def dump_plain(plain: Mapping[str, Any]) -> bytes:
    """Return encoded values as JSON, equal for equal values."""
    try:
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (RecursionError, ValueError) as error:
        raise TreeError(f"a plain value cannot be written as JSON: {error}") from error
    return text.encode("ascii")


def merge_plain(path: str, default: Any, saved: Any) -> tuple[Any, list[str], list[str]]:
    """Return a saved value with the keys that only ``default`` has, and what was different.

    Dictionaries are merged key by key, lists and tuples of equal length item by item; any other
    saved value is as it was saved.

    Returns:
        The value, the paths in it that were taken from ``default``, and those that ``default`` has
        not, which stay.
    """
    missing: list[str] = []
    unexpected: list[str] = []

    def merge(path: str, default: Any, saved: Any) -> Any:
        if type(default) is not type(saved):
            return saved
        if type(saved) is dict:
            missing.extend(f"{path}.{key}" for key in default if key not in saved)
            unexpected.extend(f"{path}.{key}" for key in saved if key not in default)
            both = {
                key: merge(f"{path}.{key}", default[key], item) if key in default else item
                for key, item in saved.items()
            }
            return {**both, **{key: item for key, item in default.items() if key not in saved}}
        if type(saved) in (list, tuple) and len(saved) == len(default):
            pairs = enumerate(zip(default, saved, strict=True))
            return type(saved)(merge(f"{path}[{number}]", *pair) for number, pair in pairs)
        return saved

    return merge(path, default, saved), missing, unexpected


def _encode_dict(path: str, value: Mapping[Any, Any], depth: int) -> Any:
    if type(value) is dict and all(type(key) is str and key not in _TAGS for key in value):
        return {key: encode_plain(f"{path}.{key}", item, depth) for key, item in value.items()}
    items = [
        [
            encode_plain(f"{path}, the key {key!r}", key, depth),
            encode_plain(f"{path}[{key!r}]", item, depth),
        ]
        for key, item in value.items()
    ]
    return {_ITEMS if type(value) is dict else _COUNTER: items}


def _decode_float(content: Any) -> float:
    if content not in ("nan", "inf", "-inf"):
        raise ValueError(f"{content!r} is none of the floats that JSON has no number for")
    return float(content)


def _decode_items(content: Any) -> dict[Any, Any]:
    items = [(decode_plain(key), decode_plain(item)) for key, item in content]
    result = dict(items)
    if len(result) != len(items):
        raise ValueError("a key is named twice")
    return result


def _decode_numpy(content: Any) -> Any:
    name, data = content
    if name not in _NUMPY_TYPES:
        raise ValueError(f"{name!r} is no type of a number")
    (number,) = np.frombuffer(bytes.fromhex(data), dtype=name)
    return number


def _decode_list(content: Any) -> list[Any]:
    if type(content) is not list:
        raise ValueError(f"{content!r} is no list")
    return [decode_plain(item) for item in content]


_DECODERS: dict[str, Callable[[Any], Any]] = {
    _FLOAT: _decode_float,
    _TUPLE: lambda content: tuple(_decode_list(content)),
    _SIZE: lambda content: torch.Size(_decode_list(content)),
    _ITEMS: _decode_items,
    _COUNTER: lambda content: collections.Counter(_decode_items(content)),
    _DTYPE: lambda content: _DTYPES[content],
    _NUMPY: _decode_numpy,
}
