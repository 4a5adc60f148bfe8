"""What a file and a person are told of each step, on the first rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import attrs

from trainwright.integration.flops import Products, utilization
from trainwright.integration.recipe import StepRecord
from trainwright.integration.strict_json import strict_json
from trainwright.stability_guards import Journal, Verdict


@attrs.frozen
class Told:
    """A step with what is told of it.

    Args:
        record: the step.
        mfu: share of the devices' peak that the model's FLOPs are; None where no peak is known.
        memory_bytes: the most memory so far, on the first rank.
        reason: why the guards intervened; empty where they did not.
    """

    record: StepRecord
    mfu: float | None
    memory_bytes: int
    reason: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks a second."""
        return self.record.tokens / self.record.seconds


class Watcher(Protocol):
    """Is told what a run does; on the first rank."""

    def stepped(self, told: Told) -> None:
        """A step was made."""
        ...

    def evaluated(self, step: int, loss: float, seconds: float | None) -> None:
        """The held-out loss after so many steps was found, in so many seconds, if known."""
        ...


@attrs.frozen
class Pace:
    """What turns seconds a step into MFU.

    Args:
        products: what a token is multiplied with.
        peak_flops_per_s: of all devices together; None where it is not known.
    """

    products: Products
    peak_flops_per_s: float | None

    def mfu(self, record: StepRecord) -> float | None:
        """Return the share of the peak that a step reaches."""
        if self.peak_flops_per_s is None or record.spans is None:
            return None
        flops = record.spans.flops(self.products)
        return utilization(flops, record.seconds, self.peak_flops_per_s)


@attrs.frozen(eq=False)
class Telling:
    """Observes the steps and tells the watchers.

    Args:
        watchers: who is told, in this order.
        pace: of the run.
        memory: returns the most bytes that were in use so far.
        journal: of interventions.
    """

    watchers: Sequence[Watcher]
    pace: Pace
    memory: Callable[[], int]
    journal: Journal

    def __call__(self, record: StepRecord) -> None:
        """Tell of a step."""
        reason = ""
        if record.verdict is not Verdict.CONTINUE and self.journal.entries:
            reason = self.journal.entries[-1].reason
        told = Told(record, self.pace.mfu(record), self.memory(), reason)
        for watcher in self.watchers:
            watcher.stepped(told)

    def evaluated(self, step: int, loss: float, seconds: float | None) -> None:
        """Tell of an evaluation."""
        for watcher in self.watchers:
            watcher.evaluated(step, loss, seconds)


class JsonLines:
    """A file that one JSON object a line is appended to; each is there when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a line; NaN and infinity are written as null."""
        self._file.write(strict_json(row) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def metrics_file(path: Path) -> Iterator[MetricsFile]:
    """Open the file of the metrics, and close it in the end."""
    lines = JsonLines(path)
    try:
        yield MetricsFile(lines)
    finally:
        lines.close()


@attrs.frozen(eq=False)
class MetricsFile:
    """Writes a line for each step and for each evaluation."""

    lines: JsonLines

    def stepped(self, told: Told) -> None:
        """Write a step's line."""
        record = told.record
        row: dict[str, float | str | bool | None] = {
            "step": record.step,
            "loss": record.loss,
            "grad_norm": record.grad_norm,
            "lr": record.lr,
            "tokens": record.tokens,
            "tokens_per_s": told.tokens_per_s,
            "step_s": record.seconds,
            "memory_bytes": told.memory_bytes,
        }
        if told.mfu is not None:
            row["mfu"] = told.mfu
        if record.verdict is not Verdict.CONTINUE:
            row["verdict"] = record.verdict.name
        elif record.skipped:
            # Gradients that overflow are no matter of guards.
            row["skipped"] = True
        self.lines.write(row)

    def evaluated(self, step: int, loss: float, seconds: float | None) -> None:
        """Write an evaluation's line."""
        row: dict[str, float] = {"step": step, "held_out_loss": loss}
        if seconds is not None:
            row["evaluate_s"] = seconds
        self.lines.write(row)
