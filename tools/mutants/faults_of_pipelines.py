"""Faults of what runs a schedule, lowers it and checks it."""

from __future__ import annotations

from tools.mutants.faults import EXECUTE, Fault

PIPELINES = "packages/pipeline-schedules/src/trainwright/pipeline_schedules"
TESTS = "packages/pipeline-schedules/tests"


def _in(file: str, words: str) -> tuple[str, ...]:
    return (f"{TESTS}/test_{file}.py", "-k", words)


FAULTS_OF_PIPELINES = (
    Fault(
        "the loss of a step is that of its last microbatch",
        f"{EXECUTE}/losses.py",
        "        self.sum += checked.detach()",
        "        self.sum.copy_(checked.detach())",
        _in("executor", "one_rank_does or losses_and_gradients"),
    ),
    Fault(
        "a stage is reduced before its first weight gradient",
        f"{PIPELINES}/lowering.py",
        "        np.maximum.at(times, rows[chosen, 1], ends[chosen])",
        "        np.minimum.at(times, rows[chosen, 1], ends[chosen])",
        _in("lower", "reduced_once"),
    ),
    Fault(
        "a stage whose weight gradients wait is reduced after its input gradients",
        f"{PIPELINES}/lowering.py",
        "    chosen = np.flatnonzero((rows[:, 0] == Kind.B) | (rows[:, 0] == Kind.W))",
        "    chosen = np.flatnonzero((rows[:, 0] == Kind.B) | (rows[:, 0] == Kind.I))",
        _in("lower", "reduced_once"),
    ),
    Fault(
        "weights are released before the last computation that reads them has ended",
        f"{PIPELINES}/lowering.py",
        "owner, ends[last], _RELEASE)",
        "owner, ends[first], _RELEASE)",
        _in("weights", "first_forward_and_released"),
    ),
    Fault(
        "messages of two boundaries between the same ranks have one tag",
        f"{EXECUTE}/transfers.py",
        "        tag = microbatch * len(self.rank_of_stage) + min(stage, stage + step)",
        "        tag = microbatch * len(self.rank_of_stage)",
        _in("executor_boundaries", "cross_over"),
    ),
    Fault(
        "the gradient of a stage's first microbatch serves all",
        f"{EXECUTE}/run.py",
        "        gradients = self._gradients.pop(slot)",
        "        gradients = self._gradients.pop(slot)\n"
        "        self._first = gradients = getattr(self, '_first', {}) or gradients",
        _in("executor", "losses_and_gradients"),
    ),
    Fault(
        "a doubled action passes the check",
        f"{PIPELINES}/completeness.py",
        "    wrong = np.argwhere(counts != expected)",
        "    wrong = np.argwhere(counts < expected)",
        (f"{TESTS}/test_verify.py",),
    ),
    Fault(
        "a second reduction of a stage passes the check",
        f"{PIPELINES}/completeness.py",
        "    wrong = np.flatnonzero((counts != trained) & (counts != each))",
        "    wrong = np.flatnonzero(counts < trained)",
        _in("weights", "taking_away_or_doubling"),
    ),
    Fault(
        "weight gradients of later stages wait one microbatch less",
        f"{PIPELINES}/generate_zero_bubble.py",
        "    behind = stage * ahead",
        "    behind = max(0, stage - 1) * ahead",
        _in("generate", "zb_h1 or zb_h2"),
    ),
    Fault(
        "what is needed next makes room for what is gathered",
        f"{PIPELINES}/stays.py",
        "dropped = max(live.keys() - needed.keys(), key=following.__getitem__)",
        "dropped = min(live.keys() - needed.keys(), key=following.__getitem__)",
        _in("weights", "no_other_order"),
    ),
)
