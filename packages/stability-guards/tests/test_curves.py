"""Curves to tune guards on: seeded, heavy-tailed, full of events, with faults where asked."""

import numpy as np
import pytest

from trainwright.stability_guards import GuardError
from trainwright.stability_guards.curves import Fault, healthy, with_fault


def test_a_curve_follows_from_its_seed_and_its_length_cuts_it_off():
    once, again, other = healthy(3, 4000), healthy(3, 4000), healthy(4, 4000)

    assert np.array_equal(once.loss, again.loss)
    assert np.array_equal(once.norm, again.norm)
    assert not np.array_equal(once.loss, other.loss)


def test_a_healthy_run_falls_has_heavy_tails_and_sees_every_kind_of_event():
    curves = [healthy(seed, 30_000, horizon=30_000) for seed in range(4)]

    kinds = {event.kind for curve in curves for event in curve.events}
    noise = np.concatenate([curve.loss / curve.level - 1.0 for curve in curves])
    assert kinds == {"lr drop", "mixture", "restart", "batch"}
    assert all(curve.level[-1] < 0.5 * curve.level[0] for curve in curves)
    assert all(np.isfinite(curve.loss).all() and (curve.norm > 0).all() for curve in curves)
    assert np.abs(noise).max() > 30 * np.median(np.abs(noise))
    assert len(list(curves[0].reports())) == 30_000


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_leaves_everything_before_its_onset_as_it_was(fault):
    curve = healthy(1, 3000)

    broken = with_fault(curve, fault, 2500, seed=5)

    assert np.array_equal(broken.loss[:2500], curve.loss[:2500])
    assert np.array_equal(broken.norm[:2500], curve.norm[:2500])
    assert (broken.fault, broken.onset) == (fault, 2500)
    assert broken.evident >= 2500


def test_faults_do_what_they_are_called():
    curve = healthy(2, 5000)

    spike = with_fault(curve, Fault.SPIKE, 4000, seed=1)
    divergence = with_fault(curve, Fault.DIVERGENCE, 4000, seed=1)
    stall = with_fault(curve, Fault.STALL, 4000, seed=1)
    bad = [with_fault(curve, Fault.NON_FINITE, 4000, seed=seed) for seed in range(12)]

    assert spike.loss[4000] > 1.25 * curve.level[4000]
    assert spike.norm[4000] > 3 * curve.norm[4000]
    assert np.array_equal(spike.loss[4030:], curve.loss[4030:])
    assert divergence.level[divergence.evident] >= 1.05 * curve.level[divergence.evident]
    assert divergence.level[-1] > 1.5 * curve.level[-1]
    assert set(stall.level[4000:]) == {curve.level[4000]}
    for one in bad:
        step = one.loss[4000], one.norm[4000], one.non_finite[4000] == 0
        assert not np.isfinite(step[:2]).all() or not step[2]


def test_mistakes_about_curves_are_refused():
    with pytest.raises(GuardError, match="steps must be between 1 and horizon=100000, got 0"):
        healthy(0, 0)
    with pytest.raises(GuardError, match="onset must be a step of the curve's 10, got 10"):
        with_fault(healthy(0, 10), Fault.SPIKE, 10, seed=0)
    with pytest.raises(GuardError, match="has the fault spike already"):
        with_fault(with_fault(healthy(0, 10), Fault.SPIKE, 5, 0), Fault.STALL, 6, 0)
