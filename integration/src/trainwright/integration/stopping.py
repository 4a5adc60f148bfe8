"""Ending a run between two steps because a signal asks for it: every rank at the same one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Protocol

import attrs
import torch

from trainwright.integration.going_on import resume_command
from trainwright.sharding import StepTotals
from trainwright.stability_guards import Report, Verdict, report_from_totals

STOPPED = 75
"""Exit code of a run that a signal has ended after it was saved; it can be resumed."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What ends a run with ``--save-on-signal``: what Slurm, Kubernetes and torchrun send first."""


ASKED = "asked_to_stop"
"""The signal of a report that says how many ranks were asked to stop."""

Heard = Mapping[str, float | torch.Tensor]
"""Numbers by name that reports bring beside the totals."""


class Stop(Protocol):
    """Whether the run ends before its last step.

    What a rank says enters the reduction that carries the norm, so that a word said by one of them
    is heard by all at the same step: no rank waits for another that has gone.
    """

    @property
    def level(self) -> int:
        """What this rank says in the reduction, beside the levels of verdicts."""
        ...

    @property
    def num_levels(self) -> int:
        """How many levels the reduction counts, the same on every rank."""
        ...

    @property
    def agreed(self) -> bool:
        """Whether all ranks end after the step whose totals were read last."""
        ...

    def read(
        self, step: int, totals: StepTotals, loss_scale: float, signals: Heard | None = None
    ) -> Report:
        """Return the report of a step of its totals, and hear what the ranks say of stopping."""
        ...


@attrs.frozen
class Stopped:
    """A run that has ended before its last step because it was asked to.

    Args:
        step: steps that were made.
        saved: the step of the newest checkpoint; None where there is none.
        out: the run folder.
    """

    step: int
    saved: int | None
    out: str

    def __str__(self) -> str:
        where = "nothing was saved" if self.saved is None else f"step {self.saved} was saved"
        go_on = resume_command(self.out)
        return f"stopped by a signal after step {self.step}, {where}; go on with: {go_on}"


class NeverStop:
    """The run makes all of its updates."""

    level = 0
    num_levels = len(Verdict)
    agreed = False

    def read(
        self, step: int, totals: StepTotals, loss_scale: float, signals: Heard | None = None
    ) -> Report:
        """Return the report."""
        return report_from_totals(step, totals, loss_scale=loss_scale, signals=signals)


@attrs.define
class StopWhenAsked:
    """The run ends after the step in which `ask` was called on some rank, or the one after it."""

    _asked: bool = False
    _agreed: bool = False
    num_levels = len(Verdict) + 1

    def ask(self) -> None:
        """Ask for the end of the run; from any thread, or a signal's handler."""
        self._asked = True

    @property
    def level(self) -> int:
        """The level after those of verdicts where this rank was asked, else 0."""
        return len(Verdict) * self._asked

    @property
    def agreed(self) -> bool:
        """Whether some rank was asked before it gave its part of the last reduction."""
        return self._agreed

    def read(
        self, step: int, totals: StepTotals, loss_scale: float, signals: Heard | None = None
    ) -> Report:
        """Return the report, without the level that is not a verdict."""
        verdicts, asking = totals.verdicts[:-1], totals.verdicts[-1]
        report = report_from_totals(
            step,
            attrs.evolve(totals, verdicts=verdicts),
            loss_scale=loss_scale,
            signals={**(signals or {}), ASKED: asking},
        )
        self._agreed = self._agreed or report.signals[ASKED] > 0
        return report


@contextlib.contextmanager
def stop_on_signals(numbers: Iterable[signal.Signals] = SIGNALS) -> Iterator[StopWhenAsked]:
    """Let these signals ask for the end of a run meanwhile; for the main thread of a process.

    The second signal of a kind does what it would have done without this: it ends the process, also
    one that waits for a peer that has gone.
    """
    stop = StopWhenAsked()

    def heard(number: int, frame: FrameType | None) -> None:
        stop.ask()
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, heard) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
