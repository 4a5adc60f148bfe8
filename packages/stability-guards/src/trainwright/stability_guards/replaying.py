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
        row = json.loads(torn)
    except ValueError:
        return
    yield _report(row, f"the last line of {path}")


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
    except ValueError as error:
        raise GuardError(f"{where} is not JSON: {error}") from error


def _report(row: Any, where: str) -> Report:
    if not isinstance(row, Mapping):
        raise GuardError(f"{where} must be an object, got {type(row).__name__}")
    rest = {("norm" if name == "grad_norm" else name): value for name, value in row.items()}
    if missing := {"step", "loss", "norm"} - rest.keys():
        raise GuardError(f"{where} must have {', '.join(sorted(missing))}, got {sorted(row)}")
    step, tokens, bad = rest.pop("step"), rest.pop("tokens", 1), rest.pop("non_finite", 0)
    loss, norm = (math.nan if rest[n] is None else rest[n] for n in ("loss", "norm"))
    signals = {
        name: float(value)
        for name, value in rest.items()
        if name not in ("loss", "norm") and type(value) in (int, float)
    }
    return Report(step=step, loss=loss, norm=norm, non_finite=bad, tokens=tokens, signals=signals)
