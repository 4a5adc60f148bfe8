"""Guards made of guards: two that must agree, one that waits, one that grows sterner."""

from __future__ import annotations

import attrs

from trainwright.stability_guards.checks import whole
from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.protocol import Guard, Report, State, Verdict


def after(steps: int, guard: Guard) -> Guard:
    """Return the guard that watches from the first step and speaks only after ``steps`` of them.

    Raises:
        GuardError: ``steps`` is not a whole number from 0.
    """
    return _After(steps, guard)


def agreeing(
    *guards: Guard,
    at_least: int = 2,
    within_steps: int = 2,
    verdict: Verdict = Verdict.ROLLBACK,
) -> Guard:
    """Return the guard that speaks where several of ``guards`` do, each in its own words or not.

    It speaks at a step at which a guard does (says anything but CONTINUE), if ``at_least`` of them
    have done so at this step or one of the ``within_steps`` - 1 before.

    Args:
        guards: what must agree.
        at_least: how many of them; 2 is what a ROLLBACK should rest on.
        within_steps: 1: all at the same step.
        verdict: what it says then, whatever they say.

    Raises:
        GuardError: fewer guards than must agree, or a number out of range.
    """
    if at_least > len(guards):
        raise GuardError(
            f"at_least={at_least} guards must agree, but there are {len(guards)}: add guards or "
            "lower at_least"
        )
    return _Agreeing(guards, at_least, within_steps, verdict)


def escalate(
    guard: Guard, *, skips: int = 3, rollbacks: int = 2, within_steps: int = 1000
) -> Guard:
    """Return the guard that meets alarms of ``guard`` with SKIP, then ROLLBACK, then HALT.

    Alarms are counted over the last ``within_steps`` steps: the first ``skips`` of them say SKIP,
    the next ``rollbacks`` ROLLBACK, all further ones HALT. Where the guard itself says more, that
    holds. A ROLLBACK so reached rests on alarms at several steps; after it the count is that of the
    snapshot, and how often a run may go back is for `Recovery` to say.

    Raises:
        GuardError: a number out of range.
    """
    return _Escalate(guard, skips, rollbacks, within_steps)


@attrs.frozen
class _After:
    steps: int = attrs.field(validator=whole(0))
    guard: Guard

    def initial(self) -> State:
        return {"seen": 0, "guard": dict(self.guard.initial())}

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        inner, verdict = self.guard.update(state["guard"], report)
        # One past the end means that the guard may speak; no step count grows for ever.
        seen = min(state["seen"] + 1, self.steps + 1)
        held = Verdict.CONTINUE if seen <= self.steps else verdict
        return {"seen": seen, "guard": dict(inner)}, held

    def reason(self, state: State) -> str:
        return self.guard.reason(state["guard"]) if state["seen"] > self.steps else ""


@attrs.frozen
class _Agreeing:
    guards: tuple[Guard, ...]
    at_least: int = attrs.field(validator=whole(1))
    within_steps: int = attrs.field(validator=whole(1))
    verdict: Verdict = attrs.field(converter=Verdict)

    def initial(self) -> State:
        states = [dict(guard.initial()) for guard in self.guards]
        return {"guards": states, "ages": [self.within_steps] * len(states), "reasons": []}

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        pairs = zip(self.guards, state["guards"], strict=True)
        results = [guard.update(own, report) for guard, own in pairs]
        alarms = [verdict is not Verdict.CONTINUE for _, verdict in results]
        ages = [
            0 if alarm else min(age + 1, self.within_steps)
            for age, alarm in zip(state["ages"], alarms, strict=True)
        ]
        states = [dict(own) for own, _ in results]
        recent = sum(age < self.within_steps for age in ages)
        quiet = self.verdict is Verdict.CONTINUE or not any(alarms) or recent < self.at_least
        reasons = [] if quiet else self._reasons(states, ages)
        after = {"guards": states, "ages": ages, "reasons": reasons}
        return after, Verdict.CONTINUE if quiet else self.verdict

    def reason(self, state: State) -> str:
        return " and ".join(state["reasons"])

    def _reasons(self, states: list[dict[str, object]], ages: list[int]) -> list[str]:
        found = []
        for place, (guard, own, age) in enumerate(zip(self.guards, states, ages, strict=True)):
            if age == 0:
                found.append(guard.reason(own))
            elif age < self.within_steps:
                found.append(f"guard {place} {age} steps before")
        return found


@attrs.frozen
class _Escalate:
    guard: Guard
    skips: int = attrs.field(validator=whole(0))
    rollbacks: int = attrs.field(validator=whole(0))
    within_steps: int = attrs.field(validator=whole(1))

    def initial(self) -> State:
        return {"guard": dict(self.guard.initial()), "seen": 0, "alarms": [], "reason": ""}

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        inner, verdict = self.guard.update(state["guard"], report)
        seen = state["seen"] + 1
        alarms = [step for step in state["alarms"] if step > seen - self.within_steps]
        after = {"guard": dict(inner), "seen": seen, "alarms": alarms, "reason": ""}
        if verdict is Verdict.CONTINUE:
            return after, verdict
        # Beyond the last rung older alarms change nothing, so the list stays short.
        after["alarms"] = [*alarms, seen][-(self.skips + self.rollbacks + 1) :]
        number = len(after["alarms"])
        rung = Verdict.HALT
        if number <= self.skips:
            rung = Verdict.SKIP
        elif number <= self.skips + self.rollbacks:
            rung = Verdict.ROLLBACK
        why = self.guard.reason(inner)
        after["reason"] = f"{why}; alarm {number} within {self.within_steps} steps"
        return after, max(rung, verdict)

    def reason(self, state: State) -> str:
        return str(state["reason"])
