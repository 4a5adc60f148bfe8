"""What a person sees of a run: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from trainwright.integration.telling import Told, Watcher
from trainwright.stability_guards import Verdict

LINES = 20
"""A log has about so many, and one for each intervention and each evaluation."""
_SLOWLY = 0.9
"""How much of its mean the pace of a step keeps from one step to the next."""


@contextmanager
def display(steps: int, done: int, console: Console | None = None) -> Iterator[Watcher]:
    """Show a run that has made ``done`` of its steps, until the block ends.

    Args:
        steps: of the run, if none is skipped: each one that is makes one more.
        done: how many of them are made.
        console: where to; None is standard error. A terminal gets a bar.
    """
    where = Console(file=sys.stderr) if console is None else console
    if not where.is_terminal:
        yield Lines(steps, done, where)
        return
    with Bar(steps, done, where) as bar:
        yield bar


class Lines:
    """Plain lines for a log: about twenty over the run, and every intervention and evaluation."""

    def __init__(self, steps: int, done: int, console: Console) -> None:
        self._console = console
        self._end = steps
        self._every = max(1, (steps - done) // LINES)
        self._left = TimeLeft()

    def stepped(self, told: Told) -> None:
        """Print the step if it is due."""
        step, self._end = told.record.step, told.record.end
        left = self._left.after(self._end - step)
        intervened = told.record.verdict is not Verdict.CONTINUE
        if step % self._every and step != self._end and not intervened:
            return
        parts = [f"step {step}/{self._end}", *said(told), left]
        if intervened:
            parts.append(intervention(told))
        self._print("  ".join(parts))

    def evaluated(self, step: int, loss: float, seconds: float | None) -> None:
        """Print the loss."""
        took = "" if seconds is None else f"  {seconds:.1f} s"
        self._print(f"step {step}/{self._end}  held-out loss {loss:.3f}{took}")

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


class Bar:
    """A progress bar, with what was done about interventions above it; a context manager."""

    def __init__(self, steps: int, done: int, console: Console) -> None:
        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}", markup=False),
            console=console,
        )
        self._task = self._progress.add_task("train", total=steps, completed=done, said="")
        self._left = TimeLeft()
        self._held_out = ""

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stepped(self, told: Told) -> None:
        """Move the bar on."""
        record = told.record
        left = self._left.after(record.end - record.step)
        loss, *rest = said(told)
        parts = [loss, *([self._held_out] if self._held_out else []), *rest, left]
        self._progress.update(
            self._task, completed=record.step, total=record.end, said=" ".join(parts)
        )
        if record.verdict is not Verdict.CONTINUE:
            line = f"step {record.step}: {intervention(told)}"
            self._progress.console.print(Text(line))

    def evaluated(self, step: int, loss: float, seconds: float | None) -> None:
        """Show the loss beside the next steps."""
        self._held_out = f"held-out {loss:.3f}"


class TimeLeft:
    """How long a run will take yet, by the pace of its latest steps and all between them."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._mean: float | None = None

    def after(self, steps_left: int) -> str:
        """Return what is left when a step was made just now, and so many are to be made."""
        now = time.monotonic()
        if self._last is not None:
            took = now - self._last
            mean = took if self._mean is None else self._mean
            self._mean = _SLOWLY * mean + (1 - _SLOWLY) * took
        self._last = now
        if self._mean is None:
            return "… left"
        return f"{duration(self._mean * steps_left)} left"


def said(told: Told) -> list[str]:
    """Return the numbers of a step as a person reads them."""
    record = told.record
    parts = [
        f"loss {record.loss:.3f}",
        f"norm {record.grad_norm:.2f}",
        f"{told.tokens_per_s:,.0f} tokens/s",
    ]
    if told.mfu is not None:
        parts.append(f"MFU {100 * told.mfu:.1f} %")
    parts.append(f"{told.memory_bytes / 1e9:.1f} GB")
    return parts


def intervention(told: Told) -> str:
    """Return what the guards did at a step, and why."""
    verdict = told.record.verdict.name
    return f"{verdict}: {told.reason}" if told.reason else verdict


def duration(seconds: float) -> str:
    """Return a time such as 12 s, 3:05 or 2:03:05."""
    whole = math.ceil(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
