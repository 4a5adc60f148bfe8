"""What every generator's schedules obey, and how much they may hold."""

from __future__ import annotations

from trainwright.pipeline_schedules.generators import Generator
from trainwright.pipeline_schedules.lowering import lower
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.verify import Sends, verify

SENDS: tuple[Sends, ...] = ("rendezvous", 1, "buffered")
"""Every kind of send: without room, with room for one message, and with any room."""


def check_generator(
    generator: Generator, ranks: int, microbatches: int, chunks: int | None = None
) -> Schedule:
    """Its schedule is of the sizes asked for, works with every kind of send, and holds its bound.

    Returns:
        The schedule.

    Raises:
        AssertionError: It has another size or name.
        ScheduleError: It does not verify, lowered or not, or holds more than `most_held`.
    """
    schedule = generator.make(ranks, microbatches, chunks)
    sizes = (schedule.name, schedule.num_ranks, schedule.num_microbatches)
    assert sizes == (generator.name, ranks, microbatches), f"{generator.name} makes {sizes}"
    stages_of_ranks = {len(schedule.stages_of(rank)) for rank in range(ranks)}
    assert stages_of_ranks == {chunks or generator.chunks or 2}, f"chunks are {stages_of_ranks}"
    limit = most_held(generator.name, ranks, microbatches, max(stages_of_ranks))
    verify(schedule, memory_limit=limit)
    lowered = lower(schedule)
    for send in SENDS:
        verify(lowered, send, memory_limit=limit)
    return schedule


def most_held(name: str, ranks: int, microbatches: int, chunks: int) -> int:
    """The most chunks' activations that any rank holds from F to the last gradient.

    Args:
        name: Of the generator.
        ranks: Ranks of the pipeline.
        microbatches: Microbatches of a step.
        chunks: Chunks a rank.
    """
    everything = chunks * microbatches
    group = -(-microbatches // max(microbatches // ranks, 1))
    ahead = {
        "sequential": 1,
        "1f1b": ranks,
        "interleaved-1f1b": (chunks - 1) * group + 2 * ranks - 1 if chunks > 1 else ranks,
        "zb-h1": ranks,
        "zb-h2": 2 * ranks - 1,
        "zb-v": 2 * ranks,
        "dualpipe-v": 2 * ranks + 1,
    }
    return min(everything, ahead.get(name, everything))
