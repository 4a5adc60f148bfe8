"""What guards see, what they say, and what a guard is."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from trainwright.stability_guards.errors import GuardError

State = Mapping[str, Any]
"""A guard's memory: plain JSON data, so that it lives in checkpoints."""

Schedule = Callable[[int], float]
"""A pure function of the update number, counted from 0: applied updates, not steps tried."""


class Verdict(enum.IntEnum):
    """What is to happen to this step; the greatest of several verdicts holds."""

    CONTINUE = 0
    """Apply the update."""
    SKIP = 1
    """Leave weights, moments, schedule and scaler counters as they are; take the next batch."""
    ROLLBACK = 2
    """Go back to a snapshot and leave the batches since then out."""
    HALT = 3
    """Stop: nothing this guard can do helps."""


def check_count(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Raise `GuardError` unless ``value`` is a whole number from 0; a validator of `attrs`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise GuardError(f"{attribute.name} must be a whole number from 0, got {value!r}")


@attrs.frozen
class Report:
    """What all ranks know of a step: the same values on every rank, so the same verdicts.

    Args:
        step: number of the step, counted from 0, skipped ones too.
        loss: mean loss over the valid tokens of the global batch; 0.0 where there are none.
        norm: global norm of the true gradients before clipping.
        non_finite: gradient elements that are infinite or NaN.
        tokens: valid tokens of the global batch.
        local_verdict: greatest verdict that a rank reached by itself, such as of a damaged batch.
        signals: further numbers by name that are the same on every rank, such as the largest
            logit; a step need not bring each.
    """

    step: int = attrs.field(validator=check_count)
    loss: float = attrs.field(converter=float)
    norm: float = attrs.field(converter=float)
    non_finite: int = attrs.field(default=0, validator=check_count)
    tokens: int = attrs.field(default=1, validator=check_count)
    local_verdict: Verdict = attrs.field(default=Verdict.CONTINUE, converter=Verdict)
    signals: Mapping[str, float] = attrs.field(factory=dict, hash=False)

    def value(self, signal: str) -> float | None:
        """Return the number of this name, ``loss`` and ``norm`` among them; None if not brought."""
        if signal == "loss":
            # Without tokens there is no loss; the zero in its place is no observation.
            return self.loss if self.tokens else None
        if signal == "norm":
            return self.norm if self.tokens else None
        return self.signals.get(signal)


@runtime_checkable
class Guard(Protocol):
    """Judges one step after the other; its memory goes in and out, it keeps none.

    Laws: ``update`` is a pure function and leaves its arguments alone; the state survives JSON;
    ``reason`` speaks exactly where the verdict was not CONTINUE.
    """

    def initial(self) -> State:
        """Return the state before the first step."""
        ...

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        """Return the state after this step and the verdict on it."""
        ...

    def reason(self, state: State) -> str:
        """Say why the last verdict was not CONTINUE; empty where it was."""
        ...


class Totals(Protocol):
    """The sums over all ranks that one all-reduce a step brings, float64 on the device."""

    @property
    def norm(self) -> torch.Tensor:
        """Norm of the gradients, 0-d."""
        ...

    @property
    def non_finite(self) -> torch.Tensor:
        """Count of non-finite gradient elements, 0-d."""
        ...

    @property
    def loss_sum(self) -> torch.Tensor:
        """Sum of the losses of all valid tokens, 0-d."""
        ...

    @property
    def tokens(self) -> torch.Tensor:
        """Count of valid tokens, 0-d."""
        ...

    @property
    def verdicts(self) -> torch.Tensor:
        """How many ranks reached each verdict, 1-d by level."""
        ...
