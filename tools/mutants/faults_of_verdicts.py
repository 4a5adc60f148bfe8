"""Faults of what guards decide and remember, and of going back."""

from __future__ import annotations

from tools.mutants.faults import Fault
from tools.mutants.faults_of_guards import GUARDS

TESTS = "packages/stability-guards/tests"


def _in(file: str, words: str) -> tuple[str, ...]:
    return (f"{TESTS}/test_{file}.py", "-k", words)


FAULTS_OF_AGREEMENT = (
    Fault(
        "ranks agree on the least verdict",
        f"{GUARDS}/agreement.py",
        "communicator.all_reduce(ballot, ReduceOp.MAX)",
        "communicator.all_reduce(ballot, ReduceOp.MIN)",
        _in("agreement", "greatest_verdict"),
    ),
    Fault(
        "of verdicts that were counted the least holds",
        f"{GUARDS}/agreement.py",
        "    return max((v for v in Verdict",
        "    return min((v for v in Verdict",
        _in("agreement", "counts_of_verdicts"),
    ),
    Fault(
        "guards hear the norm of scaled gradients",
        f"{GUARDS}/agreement.py",
        "        norm=norm / loss_scale,",
        "        norm=norm,",
        _in("agreement", "report_holds"),
    ),
    Fault(
        "of several guards the mildest one decides",
        f"{GUARDS}/guards.py",
        "        verdict = max((verdict for _, verdict in results), default",
        "        verdict = min((verdict for _, verdict in results), default",
        _in("guards", "any_of_says"),
    ),
)

FAULTS_OF_COUNTS = (
    Fault(
        "a guard that has learnt enough is silent for one step more",
        f"{GUARDS}/spikes.py",
        "count_of(before) >= min(",
        "count_of(before) > min(",
        _in("edges_of_memory", "first_value_after"),
    ),
    Fault(
        "a spike is judged by a median that it is part of",
        f"{GUARDS}/spikes.py",
        "        score = score_of(before, value) if known else 0.0\n"
        "        after = with_value(before, value, self.window)",
        "        after = with_value(before, value, self.window)\n"
        "        score = score_of(after, value) if known else 0.0",
        _in("edges_of_memory", "values_before_it"),
    ),
    Fault(
        "a guard that waits speaks one step early",
        f"{GUARDS}/combining.py",
        "        held = Verdict.CONTINUE if seen <= self.steps else verdict",
        "        held = Verdict.CONTINUE if seen < self.steps else verdict",
        _in("trend_guards", "a_guard_that_waits"),
    ),
    Fault(
        "one bad step fewer is borne",
        f"{GUARDS}/guards.py",
        "if consecutive <= self.max_consecutive_skips else",
        "if consecutive < self.max_consecutive_skips else",
        (f"{TESTS}/test_guards.py",),
    ),
    Fault(
        "a good step does not end a row of bad ones",
        f"{GUARDS}/guards.py",
        '{**state, "consecutive": 0, "reason": ""}',
        '{**state, "reason": ""}',
        _in("guards", "first_good_step"),
    ),
    Fault(
        "an alarm counts one step longer than it should",
        f"{GUARDS}/combining.py",
        "if step > seen - self.within_steps]",
        "if step >= seen - self.within_steps]",
        _in("edges_of_memory", "alarm_is_forgotten"),
    ),
    Fault(
        "signals that are a step too far apart agree",
        f"{GUARDS}/combining.py",
        "        recent = sum(age < self.within_steps for age in ages)",
        "        recent = sum(age <= self.within_steps for age in ages)",
        _in("trend_guards", "signals_agree_within"),
    ),
)

FAULTS_OF_RECOVERY = (
    Fault(
        "what guards have learnt is not saved",
        f"{GUARDS}/recovery.py",
        '            "guard": dict(self._guard_state),\n            "position"',
        '            "guard": dict(self._guard.initial()),\n            "position"',
        _in("edges_of_memory", "comes_back"),
    ),
    Fault(
        "guards keep what they learnt of steps that are taken back",
        f"{GUARDS}/recovery.py",
        '        self._guard_state = mark["guard"]\n',
        "",
        _in("recovery", "statistics_go_back"),
    ),
    Fault(
        "a run goes back once less than it may",
        f"{GUARDS}/recovery.py",
        "        if attempt > self._plan.max_rollbacks:",
        "        if attempt >= self._plan.max_rollbacks:",
        _in("recovery", "spike_that_never_ends"),
    ),
    Fault(
        "going back again begins at the newest snapshot again",
        f"{GUARDS}/recovery.py",
        "old_enough[-min(attempt, len(old_enough))]",
        "old_enough[-1]",
        (f"{TESTS}/test_recovery.py",),
    ),
    Fault(
        "a snapshot is taken one step late",
        f"{GUARDS}/recovery.py",
        "step >= newest + self._plan.snapshot_every",
        "step > newest + self._plan.snapshot_every",
        (f"{TESTS}/test_recovery.py",),
    ),
    Fault(
        "tensors that have exchanged their bits are equal",
        f"{GUARDS}/replicas.py",
        "(sums * weights).sum(), _names_digest",
        "sums.sum(), _names_digest",
        _in("edges_of_memory", "changed_places"),
    ),
    Fault(
        "chunks of a tensor may change places",
        f"{GUARDS}/replicas.py",
        "    return (chunks * weights).sum()",
        "    return chunks.sum()",
        _in("replicas", "order_and_signs"),
    ),
    Fault(
        "a stage of a ramp begins one unit early",
        f"{GUARDS}/ramps.py",
        "    begins = [-(-k * over // stages) for k",
        "    begins = [k * over // stages for k",
        (f"{TESTS}/test_composed_schedules.py", "-k", "ramp"),
    ),
)

FAULTS_OF_VERDICTS = (*FAULTS_OF_AGREEMENT, *FAULTS_OF_COUNTS, *FAULTS_OF_RECOVERY)
