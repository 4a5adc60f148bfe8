"""Whole matrices and which of their elements this rank keeps: plain data, made without talking."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TypeAlias

import attrs
import torch
from torch import nn

from trainwright.collectives import Box, ShardSpec
from trainwright.sharding.data.piece import Piece

_Kept: TypeAlias = tuple[tuple[Box, ...], tuple[tuple[int, int], ...]]
_NOTHING: _Kept = ((), ())


@attrs.frozen(eq=False)
class Matrix:
    """What an optimizer takes as a whole: a parameter, or one matrix of a stack of them.

    Args:
        label: The parameter's name; of one of a stack with its place, such as ``experts.up[3]``.
        spec: The whole of it as a part of the parameter, and the axes on which others keep the
            same of it as this rank does.
        shape: Its own shape, without the dims of the stack.
        index: Its place in the stack; () where it is the whole parameter.
        boxes: What this rank keeps of it, in its own coordinates.
        runs: Where these boxes lie in this rank's flat piece.
        parameter: This rank's piece; None where it keeps nothing.
    """

    label: str
    spec: ShardSpec
    shape: tuple[int, ...]
    index: tuple[int, ...]
    boxes: tuple[Box, ...] = ()
    runs: tuple[tuple[int, int], ...] = ()
    parameter: nn.Parameter | None = None

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def num_kept(self) -> int:
        """How many of them this rank keeps."""
        return sum(stop - start for start, stop in self.runs)

    def weight(self) -> torch.Tensor:
        """Return this rank's piece, flat; writing to it changes the piece."""
        assert self.parameter is not None
        return self.parameter.detach().view(-1)

    def gradient(self) -> torch.Tensor:
        """Return the piece's gradient, flat."""
        assert self.parameter is not None
        assert self.parameter.grad is not None
        return self.parameter.grad.detach().reshape(-1)

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the matrix where this rank keeps all of it: a view of ``flat`` if its order is."""
        if self._in_order:
            start, stop = self.runs[0]
            return flat[start:stop].view(self.shape)
        whole = flat.new_empty(self.shape)
        for box, (start, stop) in zip(self.boxes, self.runs, strict=True):
            whole[box.slices] = flat[start:stop].view(box.shape)
        return whole

    def put_back(self, weight: torch.Tensor) -> None:
        """Write an updated whole matrix into the piece, unless it is a view of that."""
        if self._in_order:
            return
        flat = self.weight()
        for box, (start, stop) in zip(self.boxes, self.runs, strict=True):
            flat[start:stop] = weight[box.slices].reshape(-1)

    @property
    def _in_order(self) -> bool:
        return len(self.boxes) == 1


def matrices_of(
    entry: ShardSpec,
    whole: ShardSpec,
    piece: Piece | None,
    *,
    stacked: bool,
) -> Iterator[Matrix]:
    """Yield what is whole of a parameter, with the part of it that this rank keeps.

    Args:
        entry: This rank's elements, uncut by data parallelism.
        whole: The whole parameter, and the axes on which its parts are replicated.
        piece: What this rank keeps of it; None where that is nothing.
        stacked: Whether a parameter of more than two dims is a stack of matrices, each a whole; of
            these only those are yielded of which ``entry`` has elements.
    """
    shape = whole.global_shape
    num_lead = len(shape) - 2 if stacked and len(shape) > 2 else 0
    for index in _places(entry, num_lead):
        box = Box((*index, *(0,) * (len(shape) - num_lead)), (*_next(index), *shape[num_lead:]))
        boxes, runs = _NOTHING if piece is None else _kept(piece.spec, box, num_lead)
        label = f"{entry.name}[{', '.join(map(str, index))}]" if num_lead else entry.name
        yield Matrix(
            label,
            ShardSpec.of_boxes(whole.name, shape, [box], whole.replicated),
            shape[num_lead:],
            index,
            boxes,
            runs,
            piece.parameter if piece is not None and runs else None,
        )


def _places(entry: ShardSpec, num_lead: int) -> list[tuple[int, ...]]:
    if num_lead == 0:
        return [()]
    found = {
        place
        for box in entry.boxes
        for place in itertools.product(
            *(range(*ends) for ends in zip(box.start[:num_lead], box.stop[:num_lead], strict=True))
        )
        if box.numel
    }
    return sorted(found)


def _next(index: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(place + 1 for place in index)


def _kept(kept: ShardSpec, whole: Box, num_lead: int) -> _Kept:
    boxes: list[Box] = []
    runs: list[tuple[int, int]] = []
    for at, box in kept.parts():
        common = box.intersect(whole)
        if common is None:
            continue
        # One place of the stack, and in the other dims all that the box has: they lie together.
        first = at + _before(box, common.start[:num_lead])
        boxes.append(Box(common.start[num_lead:], common.stop[num_lead:]))
        runs.append((first, first + common.numel))
    return tuple(boxes), tuple(runs)


def _before(box: Box, index: tuple[int, ...]) -> int:
    """Return how many elements of a box come before a place of its first dims."""
    count = 0
    for dim, place in enumerate(index):
        count += (place - box.start[dim]) * math.prod(box.shape[dim + 1 :])
    return count
