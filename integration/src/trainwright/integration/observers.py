"""What a person and a file see of each step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from trainwright.integration.recipe import StepRecord
from trainwright.stability_guards import Verdict


class Display(Protocol):
    """Shows steps while they are made; a context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def __call__(self, record: StepRecord) -> None:
        """Show one step."""
        ...


class MetricsFile:
    """Appends one JSON line a step."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", buffering=1)

    def __call__(self, record: StepRecord) -> None:
        """Write ``record`` as a line; NaN and infinity are written as null."""
        row: dict[str, float | str | None] = {
            "step": record.step,
            "loss": _finite(record.loss),
            "grad_norm": _finite(record.grad_norm),
            "lr": record.lr,
            "tokens": record.tokens,
            "tokens_per_s": record.tokens / record.seconds,
            "step_s": record.seconds,
        }
        if record.verdict is not Verdict.CONTINUE:
            row["verdict"] = record.verdict.name
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Bar:
    """A progress bar with loss, gradient norm, tokens a second and the time left."""

    def __init__(self, steps: int, done: int, console: Console) -> None:
        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("norm {task.fields[norm]:.2f}"),
            TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        nan = float("nan")
        self._task = self._progress.add_task(
            "train", total=steps, completed=done, loss=nan, norm=nan, rate=0.0
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, record: StepRecord) -> None:
        """Move the bar on."""
        self._progress.update(
            self._task,
            completed=record.step,
            loss=record.loss,
            norm=record.grad_norm,
            rate=record.tokens / record.seconds,
        )


class Lines:
    """Plain lines for a log: about twenty over the run, and every skipped step."""

    def __init__(self, steps: int, done: int, console: Console) -> None:
        self._console = console
        self._steps = steps
        self._every = max(1, (steps - done) // 20)
        self._seconds = 0.0
        self._made = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def __call__(self, record: StepRecord) -> None:
        """Print the step if it is due."""
        self._seconds += record.seconds
        self._made += 1
        skipped = record.verdict is not Verdict.CONTINUE
        if record.step % self._every and record.step != self._steps and not skipped:
            return
        left = self._seconds / self._made * (self._steps - record.step)
        note = f"  {record.verdict.name}" if skipped else ""
        self._console.print(
            f"step {record.step}/{self._steps}  loss {record.loss:.3f}  "
            f"norm {record.grad_norm:.2f}  {record.tokens / record.seconds:,.0f} tokens/s  "
            f"{left:.0f} s left{note}",
            highlight=False,
        )


class Silence:
    """Shows nothing: what every rank but the first displays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def __call__(self, record: StepRecord) -> None:
        """Show nothing."""


def display(first_rank: bool, steps: int, done: int) -> Display:
    """Return a bar for a terminal, lines for a log, and silence for ranks after the first."""
    if not first_rank:
        return Silence()
    console = Console(file=sys.stderr)
    return Bar(steps, done, console) if console.is_terminal else Lines(steps, done, console)


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
