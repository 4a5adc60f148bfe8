"""Where the time of one contestant's step goes."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time

import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from tools.bench.data_parallel.contestants import (
    MAX_NORM,
    Contestant,
    Recipe,
    builders,
    take_step,
)
from tools.bench.data_parallel.gpt import BATCHES, SHAPES, Batch
from tools.bench.data_parallel.worlds import connect
from tools.bench.table import format_table
from trainwright.collectives import Communicator

_SHOWN = 20
_WARM_UP = 3


def explain(world: Communicator, model: str, name: str, kind: str, steps: int, comm: str) -> str:
    """Return this rank's phases of a step, and the costliest operators and functions in it."""
    world = connect(world, comm)
    shape = SHAPES[model]
    contestant = builders()[name](world, Recipe(shape))
    batch = Batch.draw(shape, BATCHES[kind], seed=world.rank)
    for _ in range(_WARM_UP):
        take_step(contestant, batch)
    dist.barrier()
    phases = _phases(contestant, batch, steps)
    operators = _operators(contestant, batch)
    functions = _functions(contestant, batch)
    return "\n".join(
        [
            f"{name}, {kind}, rank {world.rank}: median of {steps} steps",
            phases,
            "\noperators of one step in all threads, by their own time",
            operators,
            "Python functions of one step in the main thread, by their own time",
            functions,
        ]
    )


def _phases(contestant: Contestant, batch: Batch, steps: int) -> str:
    taken: dict[str, list[float]] = {}
    for _ in range(steps):
        before = start = time.perf_counter()
        for phase in contestant.step(batch, MAX_NORM):
            after = time.perf_counter()
            taken.setdefault(phase, []).append(after - before)
            before = after
        taken.setdefault("all", []).append(time.perf_counter() - start)
    rows = [[phase, f"{1e3 * statistics.median(times):.1f}"] for phase, times in taken.items()]
    return format_table(["phase", "ms"], rows)


def _operators(contestant: Contestant, batch: Batch) -> str:
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        take_step(contestant, batch)
    averages = profiler.key_averages()
    return str(
        averages.table(sort_by="self_cpu_time_total", row_limit=_SHOWN, max_name_column_width=60)
    )


def _functions(contestant: Contestant, batch: Batch) -> str:
    profiler = cProfile.Profile()
    profiler.runcall(take_step, contestant, batch)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(_SHOWN)
    return text.getvalue()
