"""What the members of one group of rank threads share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainwright.collectives.parking import ThreadWorld

if TYPE_CHECKING:
    from trainwright.collectives.local_group import Meeting
    from trainwright.collectives.local_messages import Message


class LocalGroup:
    """A group: its ranks in the world, what is under way among them, and how far each has come."""

    def __init__(
        self, world: ThreadWorld, ranks: Sequence[int], name: str, buffered_sends: bool
    ) -> None:
        self.world = world
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.name = name
        self.buffered_sends = buffered_sends
        self.num_started = [0] * self.size
        self.num_finished = [0] * self.size
        self.meetings: dict[int, Meeting] = {}
        self.mail: dict[tuple[int, int, int], deque[Message]] = {}

    def describe_rank(self, rank: int) -> str:
        """Name a member by its number here and in the world."""
        world_rank = self.ranks[rank]
        return f"rank {rank}" if world_rank == rank else f"rank {rank} (world rank {world_rank})"

    def describe_progress(self) -> str:
        """Say how far each rank has come."""
        return (
            f"collectives started by each rank: {self.num_started}, finished: {self.num_finished}"
        )
