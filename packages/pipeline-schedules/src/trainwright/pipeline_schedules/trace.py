"""Runs as traces for Chrome's ``about:tracing`` and for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator

from trainwright.pipeline_schedules.bars import Bar, Run, bars_of
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.simulate import Simulation

_LANES = ("computation", "transfers, gathers, reductions, waits")
_COLOURS = {"F": "thread_state_running", "I": "good", "W": "bad", "B": "rail_response"}


def trace(run: Run, *, unit_us: float | None = None) -> str:
    """A run as JSON in Chrome's trace event format, a process for each rank.

    Args:
        run: A simulation, a schedule (simulated at F = I = W = 1, B = 2), or for each rank the
            timeline of a measured step.
        unit_us: Microseconds of one unit of time; None for 1000 of a simulation, and for seconds,
            which measured runs are in.

    Raises:
        ScheduleError: Nothing to show, or a unit that is not positive.
    """
    measured = not isinstance(run, Schedule | Simulation)
    unit = (1e6 if measured else 1e3) if unit_us is None else unit_us
    if not 0 < unit < float("inf"):
        raise ScheduleError(f"unit_us must be positive, got {unit_us}")
    bars = bars_of(run)
    events = [*_names(bars), *(_event(bar, unit) for bar in bars)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _names(bars: list[Bar]) -> Iterator[dict[str, object]]:
    for rank in sorted({bar.rank for bar in bars}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for lane in sorted({_lane(bar) for bar in bars if bar.rank == rank}):
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": rank,
                "tid": lane,
                "args": {"name": _LANES[lane]},
            }


def _event(bar: Bar, unit: float) -> dict[str, object]:
    event: dict[str, object] = {
        "ph": "X",
        "name": bar.label,
        "cat": bar.operation,
        "pid": bar.rank,
        "tid": _lane(bar),
        "ts": bar.start * unit,
        "dur": (bar.stop - bar.start) * unit,
        "args": {"stage": bar.stage, "microbatch": bar.microbatch},
    }
    if bar.operation in _COLOURS:
        event["cname"] = _COLOURS[bar.operation]
    return event


def _lane(bar: Bar) -> int:
    return 0 if bar.computes else 1
