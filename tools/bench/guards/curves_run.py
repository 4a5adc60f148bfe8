"""Guards over made-up runs: how often they cry without need, and how long they take."""

from __future__ import annotations

import attrs
import numpy as np

from trainwright.stability_guards import (
    DivergenceGuard,
    Guard,
    JointSpikeGuard,
    NonFiniteGuard,
    StallGuard,
    State,
    Verdict,
    any_of,
)
from trainwright.stability_guards.curves import Curve, Fault, healthy, with_fault

EVIDENCE = (3.0, 10.0, 30.0, 80.0, 120.0, 250.0)
TREND = (0.01, 0.02, 0.03, 0.05, 0.08)
ALLOWED = {Fault.NON_FINITE: 0, Fault.SPIKE: 2, Fault.DIVERGENCE: 200}
HORIZON = 50_000
# Steps before the earliest onset of a fault, and after it: the slowest is 5% up after some 560.
LEAD, TAIL = 400, 900


@attrs.frozen
class Calls:
    """Steps at which each guard spoke in one run, and what the joint guard had at each step."""

    spikes: dict[float, list[int]]
    divergence: dict[float, list[int]]
    others: list[int]


def listen(curve: Curve, stop: int | None = None) -> Calls:
    """Run every guard, at every setting of its dial, over the first ``stop`` steps."""
    joint = JointSpikeGuard()
    spoken: State = joint.initial()
    guards: dict[float, Guard] = {trend: DivergenceGuard(trend=trend) for trend in TREND}
    states = {trend: guard.initial() for trend, guard in guards.items()}
    others = any_of(NonFiniteGuard(), StallGuard())
    other_state = others.initial()
    calls = Calls({e: [] for e in EVIDENCE}, {t: [] for t in TREND}, [])
    for report in curve.reports():
        if report.step == stop:
            break
        spoken, verdict = joint.update(spoken, report)
        # The statistics take in every step, so one pass serves every setting of the dial.
        alone = verdict is not Verdict.CONTINUE and spoken["evidence"] < joint.evidence
        for evidence, steps in calls.spikes.items():
            if alone or spoken["evidence"] >= evidence:
                steps.append(report.step)
        for trend, guard in guards.items():
            states[trend], verdict = guard.update(states[trend], report)
            if verdict is not Verdict.CONTINUE:
                calls.divergence[trend].append(report.step)
        other_state, verdict = others.update(other_state, report)
        if verdict is not Verdict.CONTINUE:
            calls.others.append(report.step)
    return calls


def faulty(fault: Fault, seed: int) -> Curve:
    """Return a run of up to 5,000 steps in which ``fault`` begins at a drawn step."""
    onset = LEAD + int(np.random.default_rng([7, seed]).integers(4000))
    return with_fault(healthy(5000 + seed, onset + TAIL, horizon=HORIZON), fault, onset, seed)


def delay(steps: list[int], curve: Curve) -> float:
    """Return the steps from the one at which the fault is evident to the first call after onset.

    Negative where it was seen before; infinite where it never was.
    """
    after = [step for step in steps if step >= curve.onset]
    return float(after[0] - curve.evident) if after else float("inf")
