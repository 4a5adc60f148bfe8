"""How long schedules take to plan: to generate, to verify, to simulate."""

from __future__ import annotations

import itertools
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence

import attrs

from tools.bench.table import format_table
from trainwright.pipeline_schedules import GENERATORS, simulate, verify
from trainwright.pipeline_schedules.testing import check_generator


@attrs.frozen
class Plan:
    """A schedule to plan.

    Args:
        generator: Its generator's name.
        ranks: Ranks of the pipeline.
        microbatches: Microbatches of a step.
        chunks: Chunks a rank, where the generator takes any number.
    """

    generator: str
    ranks: int
    microbatches: int
    chunks: int | None = None


@attrs.frozen
class Target:
    """What some plans may take together."""

    plans: tuple[Plan, ...]
    seconds: float
    gibibytes: float | None = None


TARGETS = (
    Target(
        (Plan("1f1b", 64, 512), Plan("interleaved-1f1b", 64, 512, 4), Plan("zb-v", 64, 512)), 5.0
    ),
    Target((Plan("1f1b", 1024, 4096),), 60.0, 1.0),
)


@attrs.frozen
class Cost:
    """What a plan took, in a process of its own.

    Args:
        actions: Of the schedule.
        seconds: Of generating, verifying and simulating.
        gibibytes: The largest resident set of the process, Python and numpy included.
    """

    actions: int
    seconds: tuple[float, float, float]
    gibibytes: float


def measure(plans: Sequence[Plan]) -> list[Cost]:
    """Plan each in a fresh process, one after the other."""
    spawning = multiprocessing.get_context("spawn")
    with spawning.Pool(1, maxtasksperchild=1) as pool:
        return pool.map(plan_once, plans, chunksize=1)


def plan_once(plan: Plan) -> Cost:
    """Generate, verify and simulate one schedule in this process."""
    times = [time.perf_counter()]
    schedule = GENERATORS[plan.generator].make(plan.ranks, plan.microbatches, plan.chunks)
    times.append(time.perf_counter())
    verify(schedule)
    times.append(time.perf_counter())
    simulate(schedule)
    times.append(time.perf_counter())
    generated, verified, simulated = (b - a for a, b in itertools.pairwise(times))
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Cost(schedule.num_actions, (generated, verified, simulated), peak_kib / 2**20)


def describe(target: Target, costs: Sequence[Cost]) -> str:
    """A table of what each plan took, and a line that says whether the target was met."""
    head = ["seconds", "actions", "generate", "verify", "simulate", "together", "GiB"]
    rows = [
        [
            f"{plan.generator}, {plan.ranks} ranks, {plan.microbatches} microbatches"
            + (f", {plan.chunks} chunks" if plan.chunks else ""),
            f"{cost.actions:,}",
            *(f"{part:.2f}" for part in (*cost.seconds, sum(cost.seconds))),
            f"{cost.gibibytes:.2f}",
        ]
        for plan, cost in zip(target.plans, costs, strict=True)
    ]
    return "\n".join([format_table(head, rows), _verdict(target, costs)])


def is_met(target: Target, costs: Sequence[Cost]) -> bool:
    """Whether the plans took no more than they may."""
    peak = max(cost.gibibytes for cost in costs)
    in_time = sum(sum(cost.seconds) for cost in costs) <= target.seconds
    return in_time and (target.gibibytes is None or peak <= target.gibibytes)


def _verdict(target: Target, costs: Sequence[Cost]) -> str:
    allowed = f"{target.seconds:g} s"
    taken = f"{sum(sum(cost.seconds) for cost in costs):.2f} s"
    if target.gibibytes is not None:
        allowed += f" and {target.gibibytes:g} GiB"
        taken += f" and {max(cost.gibibytes for cost in costs):.2f} GiB"
    return f"target {allowed}, took {taken}: {'met' if is_met(target, costs) else 'MISSED'}"


def check_all(names: Sequence[str], ranks: int, microbatches: int, chunks: int) -> Iterator[str]:
    """Hold generators to its laws at every size up to these; a line for each generator.

    Raises:
        ScheduleError, AssertionError: A schedule does not obey them.
    """
    for name in names:
        generator = GENERATORS[name]
        started = time.perf_counter()
        schedules = actions = 0
        for number in range(1, chunks + 1) if generator.chunks is None else [generator.chunks]:
            for p in range(1, ranks + 1):
                for m in range(1, microbatches + 1):
                    schedules += 1
                    actions += check_generator(generator, p, m, number).num_actions
        seconds = time.perf_counter() - started
        yield f"{name}: {schedules:,} schedules, {actions:,} actions, all work; {seconds:.0f} s"
