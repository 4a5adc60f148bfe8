"""Chunks on their way up and down a tree of ranks, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import torch

from trainwright.collectives.algorithms.plan import Part, Payload, Step, side_by_side
from trainwright.collectives.algorithms.trees import TreeNode
from trainwright.collectives.checks import check_is_tensor
from trainwright.collectives.errors import UsageError

# Takes longer to send than a message to start; tensors that are worth cutting have many of them.
_CHUNK_BYTES = 1 << 20


@attrs.frozen
class Climb:
    """The chunks of one tree on their way up, down, or up and down."""

    height: int
    node: Callable[[int], TreeNode]
    first_chunk: int
    num_chunks: int

    @property
    def num_steps(self) -> int:
        """The steps that it takes to get all chunks up, or down."""
        return self.height + self.num_chunks - 1 if self.height else 0

    def up(self, rank: int) -> list[Step]:
        """Return the steps after which the root has combined all chunks, one after the other."""
        node = self.node(rank)
        # Whoever has heard nobody passes on what is its own.
        leaving = Payload.PARTIAL if node.children else Payload.CONTRIBUTION
        parents = [] if node.parent is None else [(node.parent, leaving)]
        children = [
            (child, Payload.PARTIAL if self.node(child).children else Payload.CONTRIBUTION)
            for child in node.children
        ]
        sends = self._each_chunk(parents, self.height - node.depth)
        receives = self._each_chunk(children, self.height - node.depth - 1)
        return _steps(sends, receives, self.num_steps)

    def down(self, rank: int) -> list[Step]:
        """Return the steps after which all ranks have the root's chunks."""
        node = self.node(rank)
        parents = [] if node.parent is None else [(node.parent, Payload.RESULT)]
        children = [(child, Payload.RESULT) for child in node.children]
        sends = self._each_chunk(children, node.depth)
        receives = self._each_chunk(parents, node.depth - 1)
        return _steps(sends, receives, self.num_steps)

    def up_and_down(self, rank: int) -> tuple[Step, ...]:
        """Return the steps up and down; a chunk turns round while others are on their way up."""
        turn = [Step()] * self.height
        return side_by_side(self.up(rank), [*turn, *self.down(rank)])

    def _each_chunk(
        self, peers: list[tuple[int, Payload]], first_step: int
    ) -> dict[int, tuple[Part, ...]]:
        parts = {}
        for number in range(self.num_chunks):
            chunk = self.first_chunk + number
            parts[first_step + number] = tuple(
                Part(peer, chunk, chunk + 1, payload) for peer, payload in peers
            )
        return parts


def chunks_of(what: str, tensor: torch.Tensor, num_chunks: int | None, num_trees: int = 1) -> int:
    """Return into how many chunks a tree's part of the tensor is cut.

    Raises:
        UsageError: ``num_chunks`` is not positive, or ``tensor`` is none.
    """
    if num_chunks is None:
        check_is_tensor(what, tensor)
        return max(1, math.ceil(tensor.nbytes / num_trees / _CHUNK_BYTES))
    if num_chunks < 1:
        raise UsageError(
            f"{what}: num_chunks={num_chunks} must be at least 1, or None to cut by size"
        )
    return num_chunks


def _steps(
    sends: dict[int, tuple[Part, ...]], receives: dict[int, tuple[Part, ...]], num_steps: int
) -> list[Step]:
    return [Step(sends.get(n, ()), receives.get(n, ())) for n in range(num_steps)]
