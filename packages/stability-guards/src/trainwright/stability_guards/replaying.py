"""Trying a guard on what a run has left behind."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.journal import Intervention
from trainwright.stability_guards.protocol import Guard, Report, Verdict


@attrs.frozen
class Alarm:
    """A step at which a guard would have intervened."""

    step: int
    verdict: Verdict
    reason: str


def replay(reports: Iterable[Report], guard: Guard) -> list[Alarm]:
    """Return what ``guard`` says of steps that were made without it.

    Args:
        reports: of the steps, in the order in which they were made: of `read_metrics`,
            `reports_of` or `curves.Curve.reports`.
        guard: its verdicts have no consequences, so after a ROLLBACK it sees the run as it was.

    Returns:
        One entry for each verdict but CONTINUE.
    """
    state = guard.initial()
    alarms = []
    for report in reports:
        state, verdict = guard.update(state, report)
        if verdict is not Verdict.CONTINUE:
            alarms.append(Alarm(report.step, verdict, guard.reason(state)))
    return alarms


def read_metrics(path: Path | str) -> Iterator[Report]:
    """Yield the reports of a ``metrics.jsonl``: one object a line with step, loss and norm.

    ``grad_norm`` is read as ``norm``; null is what a number that is not finite was written as, and
    read as NaN; other numbers are signals. A torn last line is left out.

    Raises:
        GuardError: another line is no object, or one without step, loss and norm.
    """
    lines = Path(path).read_bytes().split(b"\n")
    torn = lines.pop()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _report(_parsed(line, f"line {number} of {path}"), f"line {number} of {path}")
    try:
        json.loads(torn)
    except ValueError:
        return
    except RecursionError:
        pass  # whole, and refused like any other line
    yield _report(_parsed(torn, f"the last line of {path}"), f"the last line of {path}")


def reports_of(entries: Iterable[Intervention]) -> Iterator[Report]:
    """Yield the reports of the steps in a journal, so that a guard can be tried on these alone."""
    for entry in entries:
        yield Report(
            step=entry.step,
            loss=math.nan if entry.loss is None else entry.loss,
            norm=math.nan if entry.norm is None else entry.norm,
        )


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise GuardError(f"{where} is not JSON: {error}") from error


def _report(row: Any, where: str) -> Report:
    if not isinstance(row, Mapping):
        raise GuardError(f"{where} must be an object, got {type(row).__name__}")
    rest = {("norm" if name == "grad_norm" else name): value for name, value in row.items()}
    if missing := {"step", "loss", "norm"} - rest.keys():
        raise GuardError(f"{where} must have {', '.join(sorted(missing))}, got {sorted(row)}")
    step, tokens, bad = rest.pop("step"), rest.pop("tokens", 1), rest.pop("non_finite", 0)
    loss, norm = (_number(rest.pop(name), name, where) for name in ("loss", "norm"))
    signals = {
        name: _number(value, name, where)
        for name, value in rest.items()
        if type(value) in (int, float)
    }
    return Report(step=step, loss=loss, norm=norm, non_finite=bad, tokens=tokens, signals=signals)


def _number(value: Any, name: str, where: str) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float):
        raise GuardError(f"{where}: {name} must be a number or null, got {value!r}")
    try:
        return float(value)
    except OverflowError as error:
        raise GuardError(f"{where}: {name} is larger than any float") from error
