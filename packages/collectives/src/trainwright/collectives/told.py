"""A collective as its caller named it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from trainwright.collectives.flight import Record
from trainwright.collectives.protocol import ReduceOp, Work

Splits = tuple[Sequence[int] | None, Sequence[int] | None]


@attrs.frozen(eq=False)
class Told:
    """A collective as its caller named it.

    ``like`` has the shape that is alike on every rank, ``read`` and ``written`` are this rank's
    tensors that the call reads and writes; ``splits`` are those of its input and its output.
    """

    kind: str
    like: torch.Tensor | None = None
    read: torch.Tensor | None = None
    written: torch.Tensor | None = None
    op: ReduceOp | None = None
    reduce_dtype: torch.dtype | None = None
    root: int | None = None
    splits: Splits | None = None


@attrs.define(eq=False)
class Started:
    """A collective while it is being started."""

    work: Work | None = None
    told: Told | None = None
    record: Record | None = None

    def take(self, work: Work, told: Told) -> None:
        """Say what has been started."""
        self.work = work
        self.told = told


def rows(splits: Sequence[int] | None, tensor: torch.Tensor | None, size: int) -> list[int]:
    """Return how many rows of a tensor each rank sends or gets."""
    assert tensor is not None
    return [tensor.shape[0] // size] * size if splits is None else [int(part) for part in splits]
