"""The state to be stored as a tree: tensors, what part of them this rank holds, plain values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from trainwright.checkpointing.errors import TreeError
from trainwright.collectives.shard_spec import ShardSpec

from .dtypes import is_storable

RESERVED = ("__metadata__", "__crc32__")
_FLOAT = "__float__"

Tree = Mapping[str, Any]


@attrs.frozen(eq=False)
class Sharded:
    """A leaf of which the ranks hold different parts, or of which some ranks hold none.

    Args:
        tensor: This rank's part, of ``spec.local_shape`` or flat.
        spec: Which part of which global tensor it is. Its name is not looked at: the path in the
            tree is the name in the checkpoint.

    Raises:
        TreeError: Tensor and spec do not fit.
    """

    tensor: torch.Tensor
    spec: ShardSpec

    def __attrs_post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        if shape not in (self.spec.local_shape, (self.spec.numel,)):
            raise TreeError(
                f"{self.spec.name}: the spec says a local tensor of shape {self.spec.local_shape} "
                f"(or flat), got {shape}"
            )


@attrs.frozen(eq=False)
class TensorLeaf:
    """One tensor of the tree with its path; ``everywhere``: every rank holds all of it."""

    path: str
    tensor: torch.Tensor
    spec: ShardSpec
    everywhere: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's part."""
        return self.spec.numel * self.tensor.dtype.itemsize

    @property
    def is_empty(self) -> bool:
        """Whether the global tensor has no elements."""
        return 0 in self.spec.global_shape

    def is_written_by(self, rank: int, coordinates: Mapping[str, int]) -> bool:
        """Whether this rank is the one that writes the part: the first of those that hold it."""
        if self.everywhere:
            return rank == 0
        return all(coordinates.get(axis, 0) == 0 for axis in self.spec.replicated)


@attrs.frozen(eq=False)
class Leaves:
    """A tree taken apart: tensors and plain values by path."""

    tensors: dict[str, TensorLeaf]
    plain: dict[str, Any]


def take_leaves(tree: Tree) -> Leaves:
    """Return the leaves of ``tree``; paths are keys joined by ``/``.

    Raises:
        TreeError: A key or a leaf is not of a kind that can be stored; the path is named.
    """
    leaves = Leaves({}, {})
    if not isinstance(tree, Mapping):
        raise TreeError(f"the state must be a dictionary, got {type(tree).__name__}")
    for path, leaf in _walk(tree, ""):
        if isinstance(leaf, Sharded):
            _check_tensor(path, leaf.tensor)
            leaves.tensors[path] = TensorLeaf(path, leaf.tensor, leaf.spec, everywhere=False)
        elif isinstance(leaf, torch.Tensor):
            _check_tensor(path, leaf)
            spec = ShardSpec.full(path, leaf.shape)
            leaves.tensors[path] = TensorLeaf(path, leaf, spec, everywhere=True)
        else:
            leaves.plain[path] = encode_plain(path, leaf)
    return leaves


def put_plain(tree: Tree, plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``tree`` with its plain leaves replaced by those of ``plain``."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            result[key] = put_plain(value, plain, f"{path}/")
        elif isinstance(value, (torch.Tensor, Sharded)):
            result[key] = value
        else:
            result[key] = plain[path]
    return result


def encode_plain(path: str, value: Any) -> Any:
    """Return ``value`` as JSON can hold it exactly; infinities and NaN become objects.

    Raises:
        TreeError: The value is not of a JSON type; a tuple, which would come back as a list, too.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if kind is list:
        return [encode_plain(f"{path}[{number}]", item) for number, item in enumerate(value)]
    if kind is dict:
        for key in value:
            if type(key) is not str or key == _FLOAT:
                raise TreeError(
                    f"{path}: a key must be a string other than {_FLOAT!r}, got {key!r}"
                )
        return {key: encode_plain(f"{path}.{key}", item) for key, item in value.items()}
    hint = "; write list(value)" if isinstance(value, tuple) else ""
    raise TreeError(
        f"{path}: only tensors, Sharded, None and plain bool, int, float, str, list, dict can be "
        f"stored, got {kind.__module__}.{kind.__qualname__}{hint}"
    )


def decode_plain(value: Any) -> Any:
    """Return what `encode_plain` was given.

    Raises:
        ValueError: It has not made this value.
    """
    if isinstance(value, list):
        return [decode_plain(item) for item in value]
    if isinstance(value, dict):
        if _FLOAT in value:
            if value[_FLOAT] not in ("nan", "inf", "-inf"):
                raise ValueError(f"{value!r} is no plain value")
            return float(value[_FLOAT])
        return {key: decode_plain(item) for key, item in value.items()}
    return value


def dump_plain(plain: Mapping[str, Any]) -> bytes:
    """Return encoded values as JSON, equal for equal values."""
    try:
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (RecursionError, ValueError) as error:
        raise TreeError(f"a plain value cannot be written as JSON: {error}") from error
    return text.encode("ascii")


def check_axes(leaves: Leaves, coordinates: Mapping[str, int], num_ranks: int) -> None:
    """Raise TreeError unless the coordinates say where this rank is on every replicated axis.

    A single rank is at 0 on every axis and need not say so.
    """
    if num_ranks == 1:
        return
    for path, leaf in leaves.tensors.items():
        for axis in leaf.spec.replicated:
            if axis not in coordinates:
                raise TreeError(
                    f"{path} is replicated on axis {axis!r}, but the store knows this rank's "
                    f"coordinates on {sorted(coordinates)} only; give them to StateStore"
                )


def _walk(tree: Tree, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if type(key) is not str or not key or "/" in key:
            raise TreeError(
                f"{prefix or 'the top level'}: keys must be strings, not empty and without '/', "
                f"got {key!r}"
            )
        path = f"{prefix}{key}"
        if path in RESERVED:
            raise TreeError(f"{path!r} is a name that the file format keeps for itself")
        if isinstance(value, Mapping):
            yield from _walk(value, f"{path}/")
        else:
            yield path, value


def _check_tensor(path: str, tensor: torch.Tensor) -> None:
    if hasattr(tensor, "to_local"):
        raise TreeError(f"{path}: pass Sharded(tensor.to_local(), spec) in place of a DTensor")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise TreeError(f"{path}: only dense tensors can be stored, got {tensor.layout}")
    if tensor.is_meta:
        raise TreeError(f"{path}: the tensor is on the meta device and has no data")
    if not is_storable(tensor.dtype):
        raise TreeError(f"{path}: tensors of {tensor.dtype} cannot be stored")
