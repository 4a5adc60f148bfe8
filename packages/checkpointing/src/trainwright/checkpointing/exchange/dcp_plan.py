"""What a rank writes of a tree: pieces that are boxes of global tensors, and plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from trainwright.checkpointing.errors import TreeError
from trainwright.checkpointing.state.dtypes import dtype_name, is_storable
from trainwright.checkpointing.state.tree import Sharded, TensorLeaf
from trainwright.collectives import Box
from trainwright.collectives.overlap import find_crossing_boxes
from trainwright.collectives.shard_spec import ShardSpec

from .lazy import LazyTensor

_MAX_LAZY_BYTES = 1 << 28
_PLAIN = (type(None), bool, int, float, str, bytes)
Path = tuple[str | int, ...]


@attrs.frozen
class Chunk:
    """A box of a global tensor that one rank writes; ``path``: the keys that lead to the tensor."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def name(self) -> str:
        """The tensor's name in the folder."""
        return join(self.path)

    def to_json(self) -> list[Any]:
        """Return it as plain lists, numbers and strings."""
        return [self.path, self.dtype, self.shape, self.box.start, self.box.stop]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Chunk:
        """Return the chunk that `to_json` described."""
        return cls(tuple(row[0]), row[1], tuple(row[2]), Box(row[3], row[4]))


@attrs.frozen(eq=False)
class Plan:
    """What this rank writes.

    Args:
        chunks: Its pieces, in the order in which they are written.
        objects: Plain values by path; on rank 0 only.
        leaves: Where the elements are, by name.
        flat_places: Where a piece begins in its leaf's flat tensor.
    """

    chunks: list[Chunk]
    objects: dict[Path, Any]
    leaves: dict[str, TensorLeaf | LazyTensor]
    flat_places: dict[tuple[str, Box], int]

    def read(self, chunk: Chunk) -> torch.Tensor:
        """Return a chunk's elements as a packed tensor on the host with memory of its own."""
        leaf = self.leaves[chunk.name]
        if isinstance(leaf, LazyTensor):
            return leaf.read(ShardSpec.of_boxes(leaf.name, leaf.shape, [chunk.box]))
        flat = leaf.tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        at = self.flat_places[chunk.name, chunk.box]
        found = flat[at : at + chunk.box.numel].view(chunk.box.shape).cpu()
        owns_memory = found.untyped_storage().nbytes() == found.nbytes
        return found if owns_memory else found.clone()


def join(path: Path) -> str:
    """Return the name that DCP gives to what these keys lead to."""
    return ".".join(map(str, path))


def make_plan(
    tree: Mapping[str, Any], coordinates: Mapping[str, int], rank: int, size: int
) -> Plan:
    """Return what this rank writes of ``tree``.

    Raises:
        TreeError: A leaf cannot be written, or two have one name.
    """
    plan = Plan([], {}, {}, {})
    if not isinstance(tree, Mapping):
        raise TreeError(f"the state must be a dictionary, got {type(tree).__name__}")
    paths: dict[str, Path] = {}
    for path, value in _flatten((), tree):
        name = join(path)
        if name in paths:
            raise TreeError(f"{path} and {paths[name]} are both {name!r} in a DCP folder")
        paths[name] = path
        if isinstance(value, LazyTensor):
            boxes = _slabs(value) if rank == 0 else []
            plan.leaves[name] = value
            kind = dtype_name(value.dtype)
            plan.chunks.extend(Chunk(path, kind, value.shape, box) for box in boxes)
        elif isinstance(value, (Sharded, torch.Tensor)):
            leaf = _take_leaf(name, value, coordinates, size)
            if leaf.is_written_by(rank, coordinates):
                _add_leaf(plan, path, leaf)
        else:
            _check_plain(name, value)
            if rank == 0:
                plan.objects[path] = value
    return plan


def check_chunks(chunks: Sequence[Sequence[Chunk]]) -> None:
    """Raise TreeError unless the ranks' chunks cover every tensor exactly once."""
    found: dict[str, list[Chunk]] = {}
    for chunk in (chunk for rows in chunks for chunk in rows):
        found.setdefault(chunk.name, []).append(chunk)
    problems: list[str] = []
    for name, parts in found.items():
        kinds = {(part.dtype, part.shape) for part in parts}
        boxes = [part.box for part in parts]
        total = sum(box.numel for box in boxes)
        if len(kinds) > 1:
            problems.append(f"{name}: the ranks have {sorted(kinds)}")
        elif find_crossing_boxes(boxes) is not None:
            problems.append(f"{name}: two ranks write the same elements; name the replicated axes")
        elif total != Box.full(parts[0].shape).numel:
            problems.append(
                f"{name}: the parts hold {total} of {Box.full(parts[0].shape).numel} elements"
            )
    if problems:
        raise TreeError("\n".join(problems[:10]))


def _take_leaf(
    name: str, value: Sharded | torch.Tensor, coordinates: Mapping[str, int], size: int
) -> TensorLeaf:
    tensor = value.tensor if isinstance(value, Sharded) else value
    spec = value.spec if isinstance(value, Sharded) else ShardSpec.full(name, tensor.shape)
    if hasattr(tensor, "to_local") or tensor.layout != torch.strided or tensor.is_meta:
        raise TreeError(f"{name}: only dense local tensors with data can be written")
    if not is_storable(tensor.dtype):
        raise TreeError(f"{name}: tensors of {tensor.dtype} cannot be written")
    if size > 1 and not set(spec.replicated) <= set(coordinates):
        raise TreeError(
            f"{name} is replicated on {spec.replicated}, but coordinates say where this rank is "
            f"on {sorted(coordinates)} only"
        )
    return TensorLeaf(name, tensor, spec, everywhere=not isinstance(value, Sharded))


def _add_leaf(plan: Plan, path: Path, leaf: TensorLeaf) -> None:
    shape = leaf.spec.global_shape
    # No part of an empty tensor has elements; its name must not get lost.
    parts = [(0, Box.full(shape))] if leaf.is_empty else list(leaf.spec.parts())
    plan.leaves[leaf.path] = leaf
    for at, box in parts:
        plan.chunks.append(Chunk(path, dtype_name(leaf.tensor.dtype), shape, box))
        plan.flat_places[leaf.path, box] = at


def _slabs(tensor: LazyTensor) -> list[Box]:
    """Return boxes of whole rows that are small enough to be held in memory, if rows are."""
    box = Box.full(tensor.shape)
    if tensor.num_bytes <= _MAX_LAZY_BYTES or not tensor.shape:
        return [box]
    rows = max(1, tensor.shape[0] * _MAX_LAZY_BYTES // tensor.num_bytes)
    return [
        Box((at, *box.start[1:]), (min(at + rows, tensor.shape[0]), *box.stop[1:]))
        for at in range(0, tensor.shape[0], rows)
    ]


def _flatten(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield what DCP makes entries of: lists are taken apart where a tensor or a dict is inside."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten((*path, str(key)), item)
    elif isinstance(value, list) and not _is_whole(value):
        for number, item in enumerate(value):
            yield from _flatten((*path, number), item)
    else:
        yield path, value


def _is_whole(items: list[Any]) -> bool:
    for item in items:
        if isinstance(item, (Mapping, Sharded, torch.Tensor, LazyTensor)):
            return False
        if isinstance(item, list) and not _is_whole(item):
            return False
    return True


def _check_plain(name: str, value: Any) -> None:
    if type(value) in (list, tuple):
        for item in value:
            _check_plain(name, item)
    elif type(value) not in _PLAIN:
        raise TreeError(
            f"{name}: only tensors and plain values can be written, got {type(value).__name__}"
        )
