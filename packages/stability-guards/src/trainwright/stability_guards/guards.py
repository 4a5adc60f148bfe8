"""Guards, and how they are put together."""

from __future__ import annotations

import math

import attrs

from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.protocol import Guard, Report, State, Verdict


def _check_limit(_: object, attribute: attrs.Attribute[int], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise GuardError(
            f"{attribute.name} must be a whole number from 0 (0 halts at the first), got {value!r}"
        )


@attrs.frozen
class NonFiniteGuard:
    """Skips steps that would put NaN into the weights or count for nothing.

    SKIP where the loss or the norm is not finite, a gradient element is not, or no token is valid;
    HALT where that happens more than ``max_consecutive_skips`` times in a row.

    Args:
        max_consecutive_skips: steps in a row that may be skipped; 0 halts at the first bad one. A
            dynamic loss scale skips some sixteen while it finds its place.
    """

    max_consecutive_skips: int = attrs.field(default=20, validator=_check_limit)

    def initial(self) -> State:
        """Return the state before the first step."""
        return {"consecutive": 0, "total": 0, "reason": ""}

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        """Count the step if it is bad; return the counts and the verdict."""
        fault = _fault(report)
        if not fault:
            return {**state, "consecutive": 0, "reason": ""}, Verdict.CONTINUE
        consecutive = state["consecutive"] + 1
        verdict = Verdict.SKIP if consecutive <= self.max_consecutive_skips else Verdict.HALT
        reason = f"step {report.step}: {fault}; {consecutive} in a row"
        if verdict is Verdict.HALT:
            reason += f", more than max_consecutive_skips={self.max_consecutive_skips}"
        total = state["total"] + 1
        return {"consecutive": consecutive, "total": total, "reason": reason}, verdict

    def reason(self, state: State) -> str:
        """Say what was not finite, and how often in a row."""
        return str(state["reason"])


@attrs.frozen
class EmptyStepGuard:
    """Skips steps without a valid token, whose update would be decay and old moments alone."""

    def initial(self) -> State:
        """Return the state before the first step."""
        return {"reason": ""}

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        """Skip the step if it counts no token."""
        if report.tokens != 0:
            return {"reason": ""}, Verdict.CONTINUE
        return {"reason": f"step {report.step}: no valid token in the batch"}, Verdict.SKIP

    def reason(self, state: State) -> str:
        """Say that there was no valid token."""
        return str(state["reason"])


@attrs.frozen
class LocalVerdictGuard:
    """Passes on the greatest verdict that a rank reached by itself."""

    def initial(self) -> State:
        """Return the state before the first step."""
        return {"reason": ""}

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        """Return the report's local verdict."""
        verdict = report.local_verdict
        bad = verdict is not Verdict.CONTINUE
        reason = f"step {report.step}: a rank asks for {verdict.name}" if bad else ""
        return {"reason": reason}, verdict

    def reason(self, state: State) -> str:
        """Say which verdict was asked for."""
        return str(state["reason"])


def any_of(*guards: Guard) -> Guard:
    """Return the guard whose verdict is the greatest of those of ``guards``.

    Every guard sees every step. Without guards it is `never`, which is the identity: added to
    others it changes no verdict.
    """
    return _AnyOf(guards)


def never() -> Guard:
    """Return the guard that lets every step continue."""
    return _AnyOf(())


@attrs.frozen
class _AnyOf:
    guards: tuple[Guard, ...]

    def initial(self) -> State:
        return {"guards": [dict(guard.initial()) for guard in self.guards]}

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        saved = state["guards"]
        if len(saved) != len(self.guards):
            raise GuardError(
                f"the state is that of {len(saved)} guards, but there are {len(self.guards)}: "
                "resume with the guards that were saved, or start from initial()"
            )
        pairs = zip(self.guards, saved, strict=True)
        results = [guard.update(own, report) for guard, own in pairs]
        verdict = max((verdict for _, verdict in results), default=Verdict.CONTINUE)
        return {"guards": [dict(own) for own, _ in results]}, verdict

    def reason(self, state: State) -> str:
        pairs = zip(self.guards, state["guards"], strict=True)
        return "; ".join(text for guard, own in pairs if (text := guard.reason(own)))


def _fault(report: Report) -> str:
    if report.tokens == 0:
        return "no valid token in the batch"
    if not math.isfinite(report.loss):
        return f"loss is {report.loss}"
    if report.non_finite > 0:
        return f"{report.non_finite} gradient elements are not finite, norm is {report.norm}"
    if not math.isfinite(report.norm):
        return f"norm is {report.norm}"
    return ""
