"""What the command does."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import attrs

from trainwright.pipeline_schedules.command.comparison import comparison
from trainwright.pipeline_schedules.command.options import STANDARD_OUTPUT, parse
from trainwright.pipeline_schedules.costs import Costs
from trainwright.pipeline_schedules.draw import draw
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.exchange import read_csv, to_csv
from trainwright.pipeline_schedules.generators import GENERATORS
from trainwright.pipeline_schedules.lowering import lower
from trainwright.pipeline_schedules.notation import action_letters
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.search import Found, search, v_shape
from trainwright.pipeline_schedules.simulate import Simulation, simulate
from trainwright.pipeline_schedules.svg import svg
from trainwright.pipeline_schedules.trace import trace
from trainwright.pipeline_schedules.verify import verify


def main(words: list[str]) -> int:
    """Do what the words say, and return the exit code.

    Returns:
        0, or 2 where a schedule does not work, arguments are wrong or a file cannot be read or
        written; then one line on standard error says why.
    """
    chosen = parse(words)
    try:
        {"show": _show, "compare": _compare, "search": _search}[chosen.command](chosen)
    except (ScheduleError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    except MemoryError:
        sys.stderr.write("error: there is not enough memory; take fewer stages or microbatches\n")
        return 2
    return 0


def _show(chosen: argparse.Namespace) -> None:
    schedule = _schedule(chosen)
    _put_out(chosen, schedule, schedule.num_ranks if chosen.stages is None else chosen.stages)


def _schedule(chosen: argparse.Namespace) -> Schedule:
    """A generated schedule, or one from a table."""
    if chosen.schedule in GENERATORS:
        if chosen.stages is None or chosen.microbatches is None:
            raise ScheduleError(
                f"{chosen.schedule} needs --stages and --microbatches, such as --stages 4 "
                "--microbatches 12"
            )
        generator = GENERATORS[chosen.schedule]
        return generator.make(chosen.stages, chosen.microbatches, chosen.chunks)
    if not (chosen.schedule.endswith(".csv") or Path(chosen.schedule).is_file()):
        raise ScheduleError(
            f"{chosen.schedule!r} is neither a table (a file .csv) nor a generator; generators "
            f"are {', '.join(GENERATORS)}"
        )
    for name in ("stages", "chunks"):
        if getattr(chosen, name) is not None:
            raise ScheduleError(f"--{name} is for generators; a table says it itself")
    schedule = read_csv(chosen.schedule, num_microbatches=chosen.microbatches)
    verify(schedule)
    return schedule


def _search(chosen: argparse.Namespace) -> None:
    ranks = max(chosen.stages, 0)
    found = search(
        v_shape(ranks) if chosen.v_shape else range(ranks),
        chosen.microbatches,
        chosen.costs,
        memory_limit=chosen.memory_limit,
        objective=chosen.objective,
    )
    _put_out(chosen, found.schedule, chosen.stages, found)


def _put_out(
    chosen: argparse.Namespace, schedule: Schedule, stages: int, found: Found | None = None
) -> None:
    """Write what was asked for, or draw on the terminal."""
    if chosen.lowered:
        schedule = lower(schedule)
    simulation = simulate(schedule, chosen.costs)
    forms: dict[str, Callable[[], str]] = {
        "svg": lambda: svg(simulation),
        "trace": lambda: trace(simulation),
        "csv": lambda: to_csv(schedule),
        "json": lambda: _json(schedule, simulation, stages, chosen.costs, found),
    }
    wanted = {name: getattr(chosen, name) for name in forms if getattr(chosen, name) is not None}
    if wanted:
        # All of them before the first is written: what cannot be drawn leaves no file.
        texts = [(forms[name](), target) for name, target in wanted.items()]
        for text, target in texts:
            _write(text, target)
        return
    lines = [draw(simulation)]
    if found is not None:
        lines.append(f"{found.objective} {found.value:g}; none can be below {found.bound:g}")
    _write("".join(f"{line}\n" for line in lines), STANDARD_OUTPUT)


def _write(text: str, target: str) -> None:
    if target == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def _json(
    schedule: Schedule, simulation: Simulation, stages: int, costs: Costs, found: Found | None
) -> str:
    values: dict[str, object] = {
        "schedule": schedule.name,
        "stages": stages,
        "microbatches": schedule.num_microbatches,
        "makespan": simulation.makespan,
        "span": simulation.span,
        "bubble_over_ideal": simulation.bubble,
        "bubble_fraction": simulation.bubble_fraction,
        "peak_activations": list(simulation.peak_activations),
        "actions": [action_letters(schedule, rank) for rank in range(schedule.num_ranks)],
    }
    if found is not None:
        values |= {"objective": found.objective, "bound": found.bound, "costs": attrs.asdict(costs)}
    return json.dumps(values) + "\n"


def _compare(chosen: argparse.Namespace) -> None:
    table = comparison(chosen.stages, chosen.microbatches, chosen.costs, chosen.chunks)
    _write(f"{table}\n", STANDARD_OUTPUT)
