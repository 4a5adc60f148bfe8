"""How much memory a contestant needs, alone in fresh processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from tools.bench.data_parallel.contestants import Recipe, builders, take_step
from tools.bench.data_parallel.gpt import BATCHES, SHAPES, Batch
from tools.bench.data_parallel.targets import MEMORY_BELOW
from tools.bench.data_parallel.worlds import connect
from tools.bench.memory import Memory, Peak, now
from tools.bench.table import format_table
from tools.bench.tensor_memory import TensorMemory, watch
from trainwright.collectives import Communicator
from trainwright.sharding import NotAvailableError


@attrs.frozen
class Footprint:
    """What one process, or the whole job, holds.

    Args:
        before: before the contestant was built: Python, torch, connections.
        building: the peak until it was built.
        training: the peak of the steps after it.
        tensors: what tensors held between those steps and at most in one.
    """

    before: Memory
    building: Memory
    training: Memory
    tensors: TensorMemory

    @classmethod
    def of_job(cls, parts: Sequence[Footprint]) -> Footprint:
        """Return the sum over processes, as if all had their peaks at the same time."""
        return cls(
            _add([part.before for part in parts]),
            _add([part.building for part in parts]),
            _add([part.training for part in parts]),
            TensorMemory(
                sum(part.tensors.lasting for part in parts),
                sum(part.tensors.peak for part in parts),
            ),
        )


def hold(
    world: Communicator, model: str, name: str, kind: str, steps: int, comm: str
) -> Footprint | str:
    """Build one contestant and train it; return its footprint, or why it is not available."""
    world = connect(world, comm)
    shape = SHAPES[model]
    batch = Batch.draw(shape, BATCHES[kind], seed=world.rank)
    before = now()
    try:
        with Peak() as building:
            contestant = builders()[name](world, Recipe(shape))
    except NotAvailableError as error:
        return str(error)
    with Peak() as training:
        for _ in range(steps):
            take_step(contestant, batch)
    # Last, since the profiler takes memory itself.
    tensors = watch(lambda: take_step(contestant, batch))
    return Footprint(before, building.memory, training.memory, tensors)


def format_footprints(found: Mapping[str, Footprint | str], kind: str) -> str:
    """Return a table of jobs, and which of them are held below which."""
    held = {name: job for name, job in found.items() if isinstance(job, Footprint)}
    rows = [
        [
            name,
            _mib(job.before.pss),
            _mib(job.building.pss),
            _mib(job.training.pss),
            _mib(job.training.pss - job.before.pss),
            _mib(job.training.rss),
            _mib(job.tensors.lasting),
            _mib(job.tensors.peak),
        ]
        for name, job in held.items()
    ]
    head = ["", "before", "building", "training", "- before", "RSS", "tensors", "at most"]
    batch = BATCHES[kind]
    lines = [
        f"peak of the whole job in MiB, PSS unless named, {batch.sequences} x {batch.length} "
        "tokens a rank",
        format_table(head, rows),
    ]
    lines += [f"not available: {n}: {why}" for n, why in found.items() if isinstance(why, str)]
    for name, other in MEMORY_BELOW:
        if name in held and other in held:
            ratio = held[name].training.pss / held[other].training.pss
            said = "met" if ratio < 1 else "MISSED"
            lines.append(f"{name} / {other}: {ratio:.2f}, target < 1: {said}")
    return "\n".join(lines)


def _add(memories: Sequence[Memory]) -> Memory:
    return Memory(sum(memory.pss for memory in memories), sum(memory.rss for memory in memories))


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f}"
