"""A checked collective call as data, and the small interface that a transport implements."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import attrs
import torch

from trainwright.collectives.protocol import Recv, ReduceOp, Send, Work


class Kind(enum.Enum):
    """The collective operations, by name."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SCATTER = "scatter"
    GATHER = "gather"
    BARRIER = "barrier"
    SPLIT = "split"


@attrs.define(slots=True, eq=False)
class Call:
    """One rank's part in a collective; tensors are contiguous, detached and checked.

    ``input`` is what this rank contributes and ``output`` what it receives (None: nothing); for
    in-place operations they are the same tensor. ``dtype`` and ``shape`` describe the part that is
    alike on every rank. ``reduce_dtype`` is resolved: never None where an ``op`` is given.
    ``number`` counts the collectives of the group, where the transport does.
    """

    kind: Kind
    output: torch.Tensor | None = None
    input: torch.Tensor | None = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    op: ReduceOp | None = None
    reduce_dtype: torch.dtype | None = None
    root: int | None = None
    output_splits: list[int] | None = None
    input_splits: list[int] | None = None
    timeout_s: float | None = None
    color_and_key: tuple[int | None, int] | None = None
    event: torch.cuda.Event | None = None
    number: int | None = None

    def agrees_with(self, other: Call) -> bool:
        """Whether both are parts of the same collective."""
        return (
            self.kind is other.kind
            and self.shape == other.shape
            and self.dtype is other.dtype
            and self.op is other.op
            and self.root == other.root
            and self.reduce_dtype is other.reduce_dtype
        )

    def __str__(self) -> str:
        """Name the operation the way a user would have written it, with its number."""
        called = self.describe()
        return called if self.number is None else f"collective {self.number}, {called},"

    def describe(self) -> str:
        """Name all that must be alike on every rank."""
        parts = []
        if self.dtype is not None:
            parts.append(f"{describe_dtype(self.dtype)}{list(self.shape)}")
        if self.op is not None:
            parts.append(self.op.name)
        if self.reduce_dtype is not None and self.reduce_dtype is not self.dtype:
            parts.append(f"reduce_dtype={describe_dtype(self.reduce_dtype)}")
        if self.root is not None:
            parts.append(f"root={self.root}")
        return f"{self.kind.value}({', '.join(parts)})"


class Backend(Protocol):
    """A transport below the checking front: it may rely on every argument being right."""

    rank: int
    size: int
    device: torch.device
    name: str

    def start(self, call: Call) -> Work:
        """Start one collective."""
        ...

    def exchange(self, messages: Sequence[Send | Recv], timeout_s: float | None) -> Work:
        """Start all messages together."""
        ...

    def start_together(self, pending: Sequence[Call | Sequence[Send | Recv]]) -> list[Work]:
        """Start what a ``coalesce`` block collected, in order; one Work each."""
        ...

    def split(self, color: int | None, key: int) -> Backend | None:
        """Collectively make one group a color."""
        ...

    def abort(self, cause: str) -> None:
        """Make the peers' pending and later operations raise."""
        ...


def members_by_color(table: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return the ranks of each color in the order of (key, rank), by rows [has color, color, key].

    Colors stand in ascending order, so that all ranks go through them alike.
    """
    colors = sorted({color for has_color, color, _ in table if has_color})
    return {
        chosen: [
            rank
            for _, rank in sorted(
                (key, rank)
                for rank, (has_color, color, key) in enumerate(table)
                if has_color and color == chosen
            )
        ]
        for chosen in colors
    }


def describe_tensor(tensor: torch.Tensor) -> str:
    """Name dtype and shape."""
    return f"{describe_dtype(tensor.dtype)}{list(tensor.shape)}"


def describe_dtype(dtype: torch.dtype) -> str:
    """Name a dtype without the ``torch.`` in front."""
    return str(dtype).removeprefix("torch.")
