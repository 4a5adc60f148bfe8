"""The state to be stored as a tree: tensors, what part of them this rank holds, plain values."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torch.nn.parameter import is_lazy

from trainwright.checkpointing.errors import TreeError
from trainwright.collectives.shard_spec import ShardSpec

from .dtypes import is_storable
from .plain import check_depth, decode_plain, dump_plain, encode_plain

__all__ = [
    "Leaves",
    "Sharded",
    "TensorLeaf",
    "Tree",
    "check_axes",
    "decode_plain",
    "dump_plain",
    "encode_plain",
    "put_plain",
    "take_leaves",
]

RESERVED = ("__metadata__", "__crc32__")

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


_DATA = (torch.Tensor, Sharded, np.ndarray)


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

    def without(self, paths: Collection[str]) -> Leaves:
        """Return those of other paths."""
        left_out = frozenset(paths)
        return Leaves(
            {path: leaf for path, leaf in self.tensors.items() if path not in left_out},
            {path: value for path, value in self.plain.items() if path not in left_out},
        )


def take_leaves(tree: Tree, *, to_fill: bool = False) -> Leaves:
    """Return the leaves of ``tree``; paths are keys joined by ``/``.

    A dictionary is part of the tree, and so is a list or tuple that holds a tensor at any depth;
    its positions are its keys. Any other list is one plain value. Whole numbers as keys, as
    optimizers use them, stand for their digits. A numpy array is a tensor that shares its memory.

    Args:
        tree: The state.
        to_fill: Whether its tensors will be written to.

    Raises:
        TreeError: A key or a leaf is not of a kind that can be stored; the path is named.
    """
    leaves = Leaves({}, {})
    if not isinstance(tree, Mapping):
        raise TreeError(f"the state must be a dictionary, got {type(tree).__name__}")
    try:
        for path, leaf in _walk(tree, ""):
            if path in leaves.tensors or path in leaves.plain:
                raise TreeError(f"{path}: two keys of the state have this path")
            if isinstance(leaf, _DATA):
                leaves.tensors[path] = _take_tensor(path, leaf, to_fill)
            else:
                leaves.plain[path] = encode_plain(path, leaf)
    except RecursionError as error:
        raise TreeError("the state is nested too deeply, or holds itself") from error
    return leaves


def put_plain(tree: Tree, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tree`` with its plain leaves replaced by those of ``plain``, where it has them."""
    return dict(_put_into(tree, "", lambda path, value: plain.get(path, value)))


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
        if type(key) not in (str, int) or key == "" or (type(key) is str and "/" in key):
            raise TreeError(
                f"{prefix or 'the top level'}: keys must be whole numbers, or strings, not empty "
                f"and without '/', got {key!r}"
            )
        path = f"{prefix}{key}"
        check_depth(path, path.count("/"))
        if path in RESERVED:
            raise TreeError(f"{path!r} is a name that the file format keeps for itself")
        branches = _branches(value)
        if branches is None:
            yield path, value
        else:
            yield from _walk(branches, f"{path}/")


def _branches(value: Any) -> Mapping[Any, Any] | None:
    """Return what is below a node of the tree, or None if it is a leaf."""
    if isinstance(value, Mapping):
        return None if type(value) is Counter else value
    if isinstance(value, (list, tuple)) and _holds_data(value):
        return dict(enumerate(value))
    return None


def _holds_data(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_data, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_data, value))
    return isinstance(value, _DATA)


def _put_into(value: Any, path: str, plain: Callable[[str, Any], Any]) -> Any:
    """Return a node in its own type with what ``plain`` makes of each plain leaf below it."""
    branches = _branches(value) if path else value
    if branches is None:
        return value if isinstance(value, _DATA) else plain(path, value)
    prefix = f"{path}/" if path else ""
    filled = {key: _put_into(item, f"{prefix}{key}", plain) for key, item in branches.items()}
    if isinstance(value, (list, tuple)):
        items = filled.values()
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, OrderedDict):  # keeps what a module's state dict says of its versions
        ordered = copy.copy(value)
        ordered.update(filled)
        return ordered
    return filled


def _take_tensor(path: str, leaf: Any, to_fill: bool) -> TensorLeaf:
    if isinstance(leaf, Sharded):
        _check_tensor(path, leaf.tensor, to_fill)
        return TensorLeaf(path, leaf.tensor, leaf.spec, everywhere=False)
    if isinstance(leaf, torch.Tensor):
        _check_tensor(path, leaf, to_fill)
        return TensorLeaf(path, leaf, ShardSpec.full(path, leaf.shape), everywhere=True)
    if isinstance(leaf, np.ma.MaskedArray):
        raise TreeError(f"{path}: a masked array has two parts; store its data and its mask")
    try:
        if not leaf.flags.writeable:
            if to_fill:
                raise ValueError("it is read-only and cannot be filled")
            leaf = leaf.copy()
        tensor = torch.from_numpy(leaf)
    except (TypeError, ValueError) as error:
        raise TreeError(f"{path}: numpy array of {leaf.dtype}: {error}") from error
    _check_tensor(path, tensor, to_fill)
    return TensorLeaf(path, tensor, ShardSpec.full(path, leaf.shape), everywhere=True)


def _check_tensor(path: str, tensor: torch.Tensor, to_fill: bool) -> None:
    if is_lazy(tensor):
        raise TreeError(f"{path}: the parameter has no shape yet; run its module once")
    if hasattr(tensor, "to_local"):
        raise TreeError(f"{path}: pass Sharded(tensor.to_local(), spec) in place of a DTensor")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise TreeError(f"{path}: only dense tensors can be stored, got {tensor.layout}")
    if tensor.is_meta:
        raise TreeError(f"{path}: the tensor is on the meta device and has no data")
    if not is_storable(tensor.dtype):
        raise TreeError(f"{path}: tensors of {tensor.dtype} cannot be stored")
    if to_fill and tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise TreeError(f"{path}: an inference tensor can be filled under inference_mode() only")
    if to_fill and _may_overlap(tensor):
        raise TreeError(
            f"{path}: elements of an expanded tensor share memory, or of another one with shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}; pass its clone()"
        )


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether two elements may be one memory, so that filling one would change the other."""
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < end:
                return True
            end += stride * (size - 1)
    return False
