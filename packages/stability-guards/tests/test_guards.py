"""Guards judge alike on all ranks, keep plain state, and are put together by the maximum."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trainwright.stability_guards import (
    EmptyStepGuard,
    Guard,
    GuardError,
    LocalVerdictGuard,
    NonFiniteGuard,
    Report,
    Verdict,
    any_of,
    never,
)
from trainwright.stability_guards.testing import GUARD_LAWS, reports, verdicts_of

GUARDS = {
    "non-finite": NonFiniteGuard(2),
    "strict": NonFiniteGuard(0),
    "local": LocalVerdictGuard(),
    "empty": EmptyStepGuard(),
    "never": never(),
    "both": any_of(LocalVerdictGuard(), NonFiniteGuard(1)),
}
GOOD = Report(step=0, loss=2.0, norm=1.0)
BAD = {
    "loss is nan": Report(step=7, loss=math.nan, norm=1.0),
    "loss is inf": Report(step=7, loss=math.inf, norm=1.0),
    "norm is nan": Report(step=7, loss=2.0, norm=math.nan),
    "norm is inf": Report(step=7, loss=2.0, norm=math.inf),
    "3 gradient elements are not finite": Report(step=7, loss=2.0, norm=1.0, non_finite=3),
    "no valid token": Report(step=7, loss=0.0, norm=0.0, tokens=0),
}


@pytest.mark.parametrize("law", GUARD_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", GUARDS)
@given(history=reports())
def test_every_guard_keeps_the_law(law, name, history):
    law(GUARDS[name], history)


@pytest.mark.parametrize("name", GUARDS)
def test_every_guard_has_the_protocol(name):
    assert isinstance(GUARDS[name], Guard)


@given(history=reports(), limits=st.lists(st.integers(0, 4), max_size=4))
def test_any_of_says_the_greatest_of_what_its_guards_say(history, limits):
    guards = [NonFiniteGuard(limit) for limit in limits]
    single = [verdicts_of(guard, history) for guard in guards]

    together = verdicts_of(any_of(*guards), history)

    assert together == [
        max((verdicts[step] for verdicts in single), default=Verdict.CONTINUE)
        for step in range(len(history))
    ]


@pytest.mark.parametrize("text", BAD)
def test_a_step_that_is_not_finite_or_counts_for_nothing_is_skipped_with_its_reason(text):
    guard = NonFiniteGuard()

    state, verdict = guard.update(guard.initial(), BAD[text])

    assert verdict is Verdict.SKIP
    assert text in guard.reason(state)
    assert "step 7" in guard.reason(state)


def test_the_first_good_step_ends_a_run_of_skips():
    guard = NonFiniteGuard(2)
    bad = BAD["loss is nan"]

    verdicts = verdicts_of(guard, [bad, bad, GOOD, bad, bad, bad])

    skip, go = Verdict.SKIP, Verdict.CONTINUE
    assert verdicts == [skip, skip, go, skip, skip, Verdict.HALT]


def test_a_halt_says_how_many_steps_in_a_row_were_bad():
    guard = NonFiniteGuard(0)

    state, verdict = guard.update(guard.initial(), BAD["loss is inf"])

    assert verdict is Verdict.HALT
    assert guard.reason(state) == (
        "step 7: loss is inf; 1 in a row, more than max_consecutive_skips=0"
    )


class NonFiniteGuardMachine(RuleBasedStateMachine):
    """Any order of good and bad steps and restarts counts as a plain counter does."""

    def __init__(self):
        super().__init__()
        self.guard = NonFiniteGuard(2)
        self.state = self.guard.initial()
        self.run = 0
        self.total = 0
        self.verdict = Verdict.CONTINUE

    @rule(kind=st.sampled_from(sorted(BAD)))
    def bad_step(self, kind):
        self.state, self.verdict = self.guard.update(self.state, BAD[kind])
        self.run += 1
        self.total += 1

    @rule()
    def good_step(self):
        self.state, self.verdict = self.guard.update(self.state, GOOD)
        self.run = 0

    @rule()
    def restart(self):
        self.state = json.loads(json.dumps(self.state))

    @invariant()
    def counts_and_verdict_follow(self):
        assert (self.state["consecutive"], self.state["total"]) == (self.run, self.total)
        expected = [Verdict.CONTINUE, Verdict.SKIP, Verdict.SKIP, Verdict.HALT]
        assert self.verdict is expected[min(self.run, 3)]


TestNonFiniteGuardMachine = NonFiniteGuardMachine.TestCase


def test_reasons_of_several_guards_are_joined():
    guard = any_of(LocalVerdictGuard(), NonFiniteGuard())
    report = Report(step=3, loss=math.nan, norm=1.0, local_verdict=Verdict.ROLLBACK)

    state, verdict = guard.update(guard.initial(), report)

    assert verdict is Verdict.ROLLBACK
    assert guard.reason(state) == (
        "step 3: a rank asks for ROLLBACK; step 3: loss is nan; 1 in a row"
    )


def test_the_state_of_other_guards_is_refused():
    state = any_of(NonFiniteGuard()).initial()

    with pytest.raises(GuardError, match="that of 1 guards, but there are 2"):
        any_of(NonFiniteGuard(), LocalVerdictGuard()).update(state, GOOD)


def test_verdicts_are_ordered_by_severity():
    assert Verdict.CONTINUE < Verdict.SKIP < Verdict.ROLLBACK < Verdict.HALT


@pytest.mark.parametrize("limit", [-1, 1.0, True, "3"])
def test_a_limit_that_is_no_count_is_refused(limit):
    with pytest.raises(GuardError, match="max_consecutive_skips must be a whole number"):
        NonFiniteGuard(limit)


@pytest.mark.parametrize("entry", [{"step": -1}, {"tokens": 1.5}, {"non_finite": -2}])
def test_a_report_with_a_count_that_is_none_is_refused(entry):
    with pytest.raises(GuardError, match=f"{next(iter(entry))} must be a whole number"):
        Report(**{"step": 0, "loss": 1.0, "norm": 1.0, **entry})


def test_of_all_faults_an_empty_step_guard_skips_only_steps_without_tokens() -> None:
    guard = EmptyStepGuard()

    verdicts = {name: guard.update(guard.initial(), report)[1] for name, report in BAD.items()}

    assert {name for name, verdict in verdicts.items() if verdict is Verdict.SKIP} == {
        "no valid token"
    }
