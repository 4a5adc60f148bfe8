"""All generators by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs

from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.generate import (
    forward_only,
    gpipe,
    one_f_one_b,
    sequential,
)
from trainwright.pipeline_schedules.generate_looped import breadth_first, interleaved_1f1b
from trainwright.pipeline_schedules.generate_v import dualpipe_v, zb_v
from trainwright.pipeline_schedules.generate_zero_bubble import zb_h1, zb_h2
from trainwright.pipeline_schedules.schedule import Schedule


@attrs.frozen
class Generator:
    """A generator of schedules with its name and how many chunks a rank it takes.

    Args:
        name: What it is called on the command line; its schedules carry it too.
        description: One line.
        chunks: The number of chunks a rank it has; None where any number from 1 works.
        function: From ranks, microbatches and chunks to a schedule.
    """

    name: str
    description: str
    chunks: int | None
    function: Callable[[int, int, int], Schedule]

    def make(self, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
        """Generate a schedule.

        Args:
            ranks: Ranks of the pipeline.
            microbatches: Microbatches of a step.
            chunks: Chunks a rank; None for the only number there is, or 2 where any works.

        Raises:
            ScheduleError: A size below 1, or a number of chunks that this generator has not.
        """
        wanted = (self.chunks or 2) if chunks is None else chunks
        if self.chunks is not None and wanted != self.chunks:
            loops = ", ".join(name for name, other in GENERATORS.items() if other.chunks is None)
            raise ScheduleError(
                f"{self.name} has {self.chunks} chunk{'s' * (self.chunks > 1)} a rank, got "
                f"chunks={wanted}; generators with any number of them: {loops}"
            )
        return self.function(ranks, microbatches, wanted)


def _of_one_chunk(
    name: str, description: str, function: Callable[[int, int], Schedule]
) -> Generator:
    return Generator(name, description, 1, lambda ranks, number, _: function(ranks, number))


def _of_two_chunks(
    name: str, description: str, function: Callable[[int, int], Schedule]
) -> Generator:
    return Generator(name, description, 2, lambda ranks, number, _: function(ranks, number))


_ALL = (
    _of_one_chunk("sequential", "one microbatch at a time anywhere in the pipeline", sequential),
    _of_one_chunk("gpipe", "all forwards, then all backwards", gpipe),
    _of_one_chunk("1f1b", "after a warm-up one forward, one backward in turn", one_f_one_b),
    Generator(
        "interleaved-1f1b", "1F1B that loops over several chunks a rank", None, interleaved_1f1b
    ),
    Generator(
        "breadth-first",
        "all microbatches through a chunk of every rank before the next",
        None,
        breadth_first,
    ),
    _of_one_chunk("zb-h1", "split backwards, a third of 1F1B's bubble at its memory", zb_h1),
    _of_one_chunk("zb-h2", "split backwards, no bubble by span at twice the memory", zb_h2),
    _of_two_chunks("zb-v", "split backwards on a V, no bubble by span at 1F1B's memory", zb_v),
    _of_two_chunks("dualpipe-v", "forwards overlapped with backwards on a V", dualpipe_v),
    _of_one_chunk("forward-only", "forwards alone, for evaluation", forward_only),
)

GENERATORS: Mapping[str, Generator] = MappingProxyType({made.name: made for made in _ALL})
"""Every generator of the package by name."""
