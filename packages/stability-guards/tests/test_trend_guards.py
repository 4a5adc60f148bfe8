"""Spikes, divergence, stall and bounds: found in time, and not where there are none."""

import math

import attrs
import pytest
from hypothesis import given, settings

from trainwright.stability_guards import (
    BoundGuard,
    DivergenceGuard,
    GrowthGuard,
    Guard,
    GuardError,
    JointSpikeGuard,
    NonFiniteGuard,
    Report,
    SpikeGuard,
    StallGuard,
    Verdict,
    after,
    agreeing,
    all_guards,
    any_of,
    default_guards,
    escalate,
    never,
    replay,
)
from trainwright.stability_guards.curves import Fault, healthy, with_fault
from trainwright.stability_guards.testing import (
    GUARD_LAWS,
    law_a_reason_is_given_exactly_for_interventions,
    reports,
    verdicts_of,
)

SMALL = {"window": 4, "min_history": 2}
GUARDS = {
    "spike": SpikeGuard("loss", 1.5, **SMALL),
    "joint": JointSpikeGuard(2.0, least_score=1.0, least_norm_ratio=1.0, **SMALL),
    "divergence": DivergenceGuard(0.01, 0.5, block=4),
    "stall": StallGuard(400),
    "bound": BoundGuard("norm", 5.0, least=1.0, in_a_row=2),
    "growth": GrowthGuard("norm", 1.5, block=2, blocks=3),
    "after": after(3, NonFiniteGuard(2)),
    "agreeing": agreeing(
        SpikeGuard("loss", 1.0, **SMALL), SpikeGuard("norm", 1.0, **SMALL), NonFiniteGuard()
    ),
    "escalate": escalate(NonFiniteGuard(), skips=2, rollbacks=1, within_steps=4),
    "default": default_guards(),
    "all": all_guards(),
}


def steady(count, loss=2.0, norm=1.0, first=0):
    wiggle = [0.01, -0.02, 0.0, 0.02, -0.01]
    return [
        Report(step=first + at, loss=loss + wiggle[at % 5], norm=norm + wiggle[at % 5])
        for at in range(count)
    ]


@pytest.mark.parametrize("name", GUARDS)
@settings(max_examples=8)
@given(history=reports())
def test_every_guard_keeps_every_law(name, history):
    assert isinstance(GUARDS[name], Guard)
    for law in GUARD_LAWS:
        law(GUARDS[name], history)


@pytest.mark.parametrize("name", GUARDS)
def test_states_stay_json_however_large_a_finite_value_is(name):
    history = [Report(at, loss=1e300 if at % 5 else 1.0, norm=1e300) for at in range(24)]
    quiet = [Report(at, loss=0.0, norm=0.0) for at in range(36)]

    for law in GUARD_LAWS:
        law(GUARDS[name], [*quiet, *history])


@pytest.mark.parametrize("signal", ["loss", "norm"])
def test_a_value_far_above_the_running_median_is_a_spike_at_once(signal):
    values = {"loss": 2.0, "norm": 1.0, signal: 3.0}
    guard = SpikeGuard(signal)

    alarms = replay([*steady(40), Report(step=40, **values), *steady(5, first=41)], guard)

    assert [(alarm.step, alarm.verdict) for alarm in alarms] == [(40, Verdict.SKIP)]
    assert f"step 40: {signal} 3 is" in alarms[0].reason
    assert "spreads above its median" in alarms[0].reason


def test_a_spike_guard_follows_a_falling_loss_and_a_new_level():
    falling = [r for at in range(30) for r in steady(20, loss=6.0 / (1 + at), first=20 * at)]
    risen = steady(300, loss=2.5, first=600)

    alarms = replay([*falling, *risen], SpikeGuard("loss", least_ratio=1.5))

    # It cries at the first half of its window, and then it has learnt the new level.
    assert alarms[0].step == 600
    assert all(alarm.step < 600 + 128 for alarm in alarms)


def test_loss_and_norm_must_spike_together_within_two_steps():
    def verdict(*last):
        history = steady(60)
        for loss, norm in last:
            history.append(Report(step=len(history), loss=loss, norm=norm))
        return verdicts_of(JointSpikeGuard(), history)[-1]

    assert verdict((2.0, 5.0)) is Verdict.CONTINUE
    assert verdict((2.8, 1.0)) is Verdict.CONTINUE
    assert verdict((2.8, 5.0)) is Verdict.SKIP
    assert verdict((2.0, 5.0), (2.8, 1.0)) is Verdict.SKIP
    assert verdict((2.0, 5.0), (2.0, 1.0), (2.8, 1.0)) is Verdict.CONTINUE
    assert verdict((200.0, 1.0)) is Verdict.SKIP


def test_what_is_not_finite_or_without_tokens_is_no_part_of_the_statistics():
    odd = [
        Report(step=0, loss=math.nan, norm=math.inf),
        Report(step=0, loss=0.0, norm=0.0, tokens=0),
    ]
    guard = any_of(SpikeGuard("loss"), JointSpikeGuard(), DivergenceGuard(), StallGuard())
    state = guard.initial()
    for report in steady(50):
        state, _ = guard.update(state, report)

    for report in odd:
        assert guard.update(state, report) == (state, Verdict.CONTINUE)


def test_a_loss_that_goes_on_rising_diverges_and_one_that_has_stepped_up_does_not():
    base = steady(200)
    rising = [Report(step=200 + at, loss=2.0 * (1 + 0.001 * at), norm=1.0) for at in range(300)]
    stepped = steady(1000, loss=2.3, first=200)

    alarms = replay([*base, *rising], DivergenceGuard())

    assert alarms[0].verdict is Verdict.ROLLBACK
    assert alarms[0].step <= 200 + 50 + 200
    assert "and has risen all the way" in alarms[0].reason
    assert replay([*base, *stepped], DivergenceGuard()) == []
    assert replay([*base, *stepped, *steady(300, loss=2.39)], DivergenceGuard()) == []
    assert replay([*base, *steady(100, loss=3.0, first=200)], DivergenceGuard()) != []


@pytest.mark.parametrize("apart", [40, 60, 95, 130, 200])
def test_two_steps_up_within_one_window_are_no_divergence_wherever_they_fall(apart):
    base = steady(400)
    for first in (0, 7, 14):
        up = [*steady(first + apart, loss=2.2), *steady(600, loss=2.38)]

        assert replay([*base, *up], DivergenceGuard()) == []


def test_a_divergence_counts_noise_of_the_losses_against_itself():
    rising = [2.0 + 0.0006 * max(at - 300, 0) for at in range(700)]
    swing = [0.9, -0.7, 0.1, -1.1, 1.2, -0.2, 0.5, -0.6, 0.8, -0.9]

    def steps(noise):
        history = [
            Report(at, loss=level + noise * swing[at % 10], norm=1.0)
            for at, level in enumerate(rising)
        ]
        return [alarm.step for alarm in replay(history, DivergenceGuard())]

    assert 500 < steps(0.005)[0] < 640
    assert steps(0.2) == []


def test_a_loss_that_stands_still_stalls_and_one_that_falls_or_has_risen_and_fallen_does_not():
    guard = StallGuard(4000)
    flat = steady(6000)
    falling = [Report(step=at, loss=2.0 - 1e-5 * at, norm=1.0) for at in range(6000)]
    tent = [
        Report(step=at, loss=2.0 + 0.1 * (1 - abs(at - 2000) / 2000), norm=1.0)
        for at in range(4000)
    ]

    assert replay(flat, guard)[0].step == 3999
    assert replay(falling, guard) == []
    assert replay(tent, guard) == []


def with_signal(name, values):
    return [
        Report(step=at, loss=2.0, norm=1.0, signals={} if value is None else {name: value})
        for at, value in enumerate(values)
    ]


@pytest.mark.parametrize("guard", [DivergenceGuard(block=4), StallGuard(400)])
def test_a_guard_that_only_watches_gives_no_reason(guard):
    history = [*steady(8), *steady(800, loss=9.0, first=8)]
    assert replay(history, guard)

    watching = attrs.evolve(guard, verdict=Verdict.CONTINUE)

    law_a_reason_is_given_exactly_for_interventions(watching, history)


def test_a_ratio_out_of_bounds_for_so_many_observations_is_named():
    history = with_signal("update_ratio", [1e-3, 0.5, None, 0.5, 1e-3, 0.5, math.nan, 0.5])

    alarms = replay(history, BoundGuard("update_ratio", 0.1, in_a_row=3))

    assert [alarm.step for alarm in alarms] == [7]
    assert alarms[0].reason == ("step 7: update_ratio 0.5 is outside of [-inf, 0.1], 3 in a row")


def test_logits_that_grow_smoothly_are_noticed_and_ones_that_stay_are_not():
    growing = with_signal("logit_max", [20.0 * 1.002**at for at in range(1500)])
    noisy = with_signal("logit_max", [20.0 + at % 13 for at in range(1500)])
    guard = GrowthGuard("logit_max", 3.0, floor=50.0)

    assert 500 < replay(growing, guard)[0].step < 700
    assert replay(noisy, guard) == []


def test_a_guard_that_waits_watches_from_the_first_step():
    spike = Report(step=40, loss=3.0, norm=1.0)

    assert replay([*steady(40), spike], after(41, SpikeGuard("loss"))) == []
    assert len(replay([*steady(40), spike], after(40, SpikeGuard("loss")))) == 1


def test_signals_agree_within_so_many_steps_and_say_what_each_saw():
    guard = agreeing(SpikeGuard("loss"), SpikeGuard("norm"), within_steps=3)
    loss, norm = Report(40, loss=3.0, norm=1.0), Report(42, loss=2.0, norm=2.0)
    quiet = steady(1, first=41)

    alarms = replay([*steady(40), loss, *quiet, norm], guard)
    late = replay([*steady(40), loss, *quiet, *quiet, norm], guard)

    assert [(alarm.step, alarm.verdict) for alarm in alarms] == [(42, Verdict.ROLLBACK)]
    assert "step 42: norm" in alarms[0].reason
    assert "guard 0 2 steps before" in alarms[0].reason
    assert late == []


def test_alarms_in_succession_skip_then_go_back_then_halt_and_are_forgotten():
    guard = escalate(NonFiniteGuard(100), skips=2, rollbacks=1, within_steps=10)
    bad, good = Report(0, loss=math.nan, norm=1.0), Report(0, loss=1.0, norm=1.0)

    verdicts = verdicts_of(guard, [bad, good, bad, bad, bad, *[good] * 10, bad])

    assert [verdict.name for verdict in verdicts if verdict is not Verdict.CONTINUE] == [
        "SKIP", "SKIP", "ROLLBACK", "HALT", "SKIP",
    ]  # fmt: skip


def test_a_graver_verdict_is_not_lowered_by_escalation():
    bad = Report(0, loss=math.nan, norm=1.0)

    assert verdicts_of(escalate(NonFiniteGuard(0)), [bad]) == [Verdict.HALT]


def test_numbers_that_no_guard_can_have_are_refused():
    with pytest.raises(GuardError, match="threshold must be positive, got 0"):
        SpikeGuard("loss", 0)
    with pytest.raises(GuardError, match="window must be a whole number from 4, got 3"):
        SpikeGuard("loss", window=3)
    with pytest.raises(GuardError, match="at_least=2 guards must agree, but there are 1"):
        agreeing(never())
    with pytest.raises(GuardError, match=r"least must be below most, got 2.0 and 1.0"):
        BoundGuard("loss", 1.0, least=2.0)
    with pytest.raises(GuardError, match="skips must be a whole number from 0"):
        escalate(never(), skips=-1)


FOUND_WITHIN = {Fault.NON_FINITE: 0, Fault.SPIKE: 2, Fault.DIVERGENCE: 200}


@pytest.mark.parametrize("fault", FOUND_WITHIN, ids=lambda fault: fault.value)
@pytest.mark.parametrize("seed", range(2))
def test_faults_of_made_up_runs_are_found_in_time_and_nothing_else(fault, seed):
    curve = with_fault(healthy(200 + seed, 2400), fault, 1900, seed)

    alarms = replay(curve.reports(), default_guards())

    assert 1900 <= alarms[0].step <= curve.evident + FOUND_WITHIN[fault]
