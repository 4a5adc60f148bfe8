"""A run that goes back ends as one whose reader never yields what was left out."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trainwright.collectives import LocalWorld
from trainwright.stability_guards import (
    AbandonedStateError,
    FileJournal,
    GuardError,
    HaltError,
    LocalVerdictGuard,
    MemoryJournal,
    MemorySnapshots,
    NonFiniteGuard,
    Positions,
    Recovery,
    RecoveryPlan,
    Report,
    Verdict,
    any_of,
    check_not_abandoned,
    default_guards,
    shared_journal,
)

NONE = Positions()


class Reader:
    """A stream of whole numbers, read in batches."""

    def __init__(self):
        self.position = 0
        self.last = Positions()
        self._left_out = Positions()

    def seek(self, position, left_out):
        self.position, self._left_out = position, left_out

    def next_batch(self, count):
        self.last, self.position = self._left_out.draw(self.position, count)
        return self.last


class Trainer:
    """Its weights are the list of the batches that it was trained on."""

    def __init__(self):
        self.weights = []
        self.step = 0
        self.updates = 0

    def state_dict(self):
        return {"weights": list(self.weights), "step": self.step, "updates": self.updates}

    def load_state_dict(self, state):
        self.weights = [Positions(batch.spans) for batch in state["weights"]]
        self.step, self.updates = state["step"], state["updates"]


class Run:
    """A trainer with a reader and recovery."""

    def __init__(self, journal, plan, guard=None, batch=lambda updates: 1, exclude=NONE):
        self.trainer, self.reader, self.batch = Trainer(), Reader(), batch
        snapshots = MemorySnapshots({"trainer": self.trainer}, keep=3)
        guard = any_of(NonFiniteGuard(100), LocalVerdictGuard()) if guard is None else guard
        self.recovery = Recovery(guard, snapshots, self.reader, journal, plan, exclude)

    def step(self, judged=lambda batch: Verdict.CONTINUE):
        trainer = self.trainer
        batch = self.reader.next_batch(self.batch(trainer.updates))
        report = Report(trainer.step, loss=1.0, norm=1.0, local_verdict=judged(batch))
        verdict = self.recovery.judge(report, trainer.updates)
        if verdict is Verdict.CONTINUE:
            trainer.weights.append(batch)
            trainer.updates += 1
        if verdict is not Verdict.ROLLBACK:
            trainer.step += 1
            self.recovery.stepped(trainer.step, verdict)
        return verdict

    def steps(self, count, judged):
        return [self.step(judged) for _ in range(count)]

    @property
    def trained(self):
        return [at for batch in self.trainer.weights for at in range(*batch.spans[0])]

    def checkpoint(self):
        state = self.trainer.state_dict(), self.recovery.state_dict(), self.reader.position
        return state[0], json.loads(json.dumps(state[1], allow_nan=False)), state[2]

    def resume(self, checkpoint):
        trainer, recovery, position = checkpoint
        # First, for it refuses what has been abandoned, and nothing must be loaded then.
        self.recovery.load_state_dict(recovery)
        self.trainer.load_state_dict(trainer)
        self.reader.position = position


def bad_at(*positions, verdict=Verdict.ROLLBACK):
    return lambda batch: verdict if any(at in batch for at in positions) else Verdict.CONTINUE


def test_a_rollback_leaves_out_the_bad_batch_and_trains_the_others_again():
    journal = MemoryJournal()
    run = Run(journal, RecoveryPlan(snapshot_every=10, skip_before=0))
    run.recovery.begin(0)

    verdicts = [run.step(bad_at(13)) for _ in range(20)]

    assert run.trained == [*range(13), 14, 15, 16]
    assert verdicts.count(Verdict.ROLLBACK) == 1
    (entry,) = journal.entries
    assert (entry.back_to, entry.position, str(entry.left_out)) == (10, 10, "13")
    assert (entry.step, entry.updates, entry.attempt) == (13, 13, 1)
    assert run.trainer.updates == len(run.trained)


def test_a_rollback_may_leave_out_all_since_the_snapshot_or_some_before():
    def trained(skip_before):
        run = Run(MemoryJournal(), RecoveryPlan(snapshot_every=10, skip_before=skip_before))
        run.recovery.begin(0)
        while run.trainer.updates < 13:
            run.step(bad_at(13))
        while run.reader.position < 18:
            run.step(bad_at(13))
        return run.trained

    assert trained(None) == [*range(10), 14, 15, 16, 17]
    assert trained(1) == [*range(12), 14, 15, 16, 17]
    assert trained(5) == [*range(8), 14, 15, 16, 17]


def test_skipped_batches_count_as_read_and_not_as_updates_and_stay_out_after_resuming():
    journal = MemoryJournal()
    run = Run(journal, RecoveryPlan())
    run.recovery.begin(0)
    skips = bad_at(3, 4, 5, verdict=Verdict.SKIP)
    checkpoints = []
    for _ in range(12):
        checkpoints.append(run.checkpoint())
        run.step(skips)

    assert run.trained == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    assert (run.trainer.updates, run.trainer.step) == (9, 12)
    for checkpoint in checkpoints:
        again = Run(journal, RecoveryPlan())
        again.resume(checkpoint)
        again.recovery.begin(again.trainer.step)
        while again.reader.position < 12:
            assert again.step() is Verdict.CONTINUE
        assert again.trained == run.trained
        assert again.trainer.updates == 9


def test_skips_of_a_loss_scale_may_be_read_again():
    journal = MemoryJournal()
    run = Run(journal, RecoveryPlan(replay_skipped=True))
    run.recovery.begin(0)

    run.step(bad_at(0, verdict=Verdict.SKIP))

    assert [entry.verdict for entry in journal.entries] == [Verdict.SKIP]
    assert not run.recovery.left_out


def test_a_spike_that_never_ends_stops_the_run_after_so_many_attempts():
    journal = MemoryJournal()
    run = Run(journal, RecoveryPlan(snapshot_every=4, skip_before=0, max_rollbacks=2))
    run.recovery.begin(0)

    with pytest.raises(HaltError, match=r"gone back 2 times in succession, which is max_rollbacks"):
        run.steps(100, bad_at(*range(9, 100)))

    assert [e.verdict.name for e in journal.entries] == ["ROLLBACK", "ROLLBACK", "HALT"]
    assert [e.attempt for e in journal.entries] == [1, 2, 0]
    # The second attempt goes back one snapshot further.
    assert [e.back_to for e in journal.entries] == [8, 4, None]


def test_rollbacks_far_apart_are_no_succession():
    journal = MemoryJournal()
    plan = RecoveryPlan(snapshot_every=5, skip_before=0, max_rollbacks=1, settled_after=10)
    run = Run(journal, plan)
    run.recovery.begin(0)

    while run.reader.position < 60:
        run.step(bad_at(7, 27, 47))

    assert [entry.attempt for entry in journal.entries] == [1, 1, 1]
    assert run.trained == [at for at in range(60) if at not in (7, 27, 47)]


def test_attempts_are_counted_across_restarts():
    journal = MemoryJournal()
    plan = RecoveryPlan(snapshot_every=5, skip_before=0, max_rollbacks=1)
    run = Run(journal, plan)
    run.recovery.begin(0)
    for _ in range(9):
        run.step(bad_at(7))

    again = Run(journal, plan)
    again.recovery.begin(0)

    with pytest.raises(HaltError, match="max_rollbacks"):
        again.steps(10, bad_at(6))


def test_a_checkpoint_of_training_that_was_taken_back_is_refused_and_an_older_one_is_not():
    journal = MemoryJournal()
    run = Run(journal, RecoveryPlan(snapshot_every=10, skip_before=0))
    run.recovery.begin(0)
    states = {}
    for _ in range(14):
        states[run.trainer.step] = run.checkpoint()
        run.step(bad_at(13))

    check_not_abandoned(states[10][1], journal.entries)
    with pytest.raises(AbandonedStateError, match=r"resume from one at step 10 or before"):
        Run(journal, RecoveryPlan()).resume(states[12])
    with pytest.raises(GuardError, match="keep the journal with the checkpoints"):
        Run(MemoryJournal(), RecoveryPlan()).resume(run.checkpoint())


def test_what_was_trained_before_the_only_snapshot_stays_trained_and_off_the_list():
    journal = MemoryJournal()
    run = Run(journal, RecoveryPlan(snapshot_every=100, skip_before=5))
    for _ in range(3):
        run.reader.next_batch(1)
    run.recovery.begin(3)

    run.step(bad_at(3))

    assert str(journal.entries[0].left_out) == "3"
    assert run.reader.position == 3


def test_statistics_go_back_with_the_snapshot():
    guard = any_of(NonFiniteGuard(2), LocalVerdictGuard())
    run = Run(MemoryJournal(), RecoveryPlan(snapshot_every=100, skip_before=0), guard)
    run.recovery.begin(0)
    before = run.checkpoint()[1]["guard"]
    run.step(bad_at(0, verdict=Verdict.SKIP))

    run.step(bad_at(1))

    assert run.checkpoint()[1]["guard"] == before


def test_all_ranks_go_back_alike_and_one_journal_file_serves_them(tmp_path):
    def train(communicator):
        journal = shared_journal(tmp_path / "journal.jsonl", communicator)
        run = Run(journal, RecoveryPlan(snapshot_every=4, skip_before=0))
        run.recovery.begin(0)
        while run.reader.position < 12:
            run.step(bad_at(6))
        return run.trained, journal.entries

    results = LocalWorld(3).run(train)

    assert all(result == results[0] for result in results)
    assert FileJournal(tmp_path / "journal.jsonl").entries == results[0][1]
    assert results[0][0] == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    "entry", [{"snapshot_every": 0}, {"skip_before": -1}, {"max_rollbacks": 1.5}]
)
def test_plans_that_are_none_are_refused(entry):
    with pytest.raises(GuardError, match=f"{next(iter(entry))} must be a whole number"):
        RecoveryPlan(**entry)


def _changed(state, path, value):
    if not path:
        return value
    copy = list(state) if isinstance(state, list) else dict(state)
    copy[path[0]] = _changed(state[path[0]], path[1:], value)
    return copy


WINDOW = ("guard", "guards", 2, "guard", "loss")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((), 7),
        (("guard",), {}),
        (("guard", "guards"), []),
        (("guard", "guards", 0, "total"), "many"),
        (("guard", "guards", 0), {"consecutive": 0, "reason": ""}),
        ((*WINDOW, "ordered"), [1.0, 0.5]),
        ((*WINDOW, "recent"), [{}]),
        ((*WINDOW, "next"), 9),
        (("position",), None),
        (("journalled",), -1),
        (("batches",), [[["a", 1]]]),
        (("marks",), {"first": {}}),
        (("marks",), {"0": {"position": 0, "batches": []}}),
    ],
)
def test_a_state_that_these_guards_cannot_go_on_from_is_refused_and_changes_nothing(path, value):
    run = Run(MemoryJournal(), RecoveryPlan(), guard=default_guards())
    run.recovery.begin(0)
    for _ in range(3):
        run.step()
    state = run.recovery.state_dict()
    run.recovery.load_state_dict(json.loads(json.dumps(state)))

    with pytest.raises(GuardError):
        run.recovery.load_state_dict(_changed(json.loads(json.dumps(state)), path, value))

    assert run.recovery.state_dict() == state


class RecoveryMachine(RuleBasedStateMachine):
    """Any order of steps, interventions, checkpoints and crashes trains every batch once."""

    @initialize(
        every=st.integers(1, 5),
        skip_before=st.sampled_from([None, 0, 1, 3]),
        ramp=st.sampled_from([1, 4, 1000]),
        exclude=st.lists(st.integers(0, 20), max_size=4),
    )
    def start(self, every, skip_before, ramp, exclude):
        self.folder = Path(tempfile.mkdtemp())
        self.plan = RecoveryPlan(every, skip_before, max_rollbacks=1000)
        self.batch = lambda updates: 1 + updates // ramp
        self.exclude = Positions((at, at + 1) for at in exclude)
        self.checkpoints = []
        self.run = self._fresh()
        self.run.recovery.begin(0)

    def teardown(self):
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def _fresh(self):
        journal = FileJournal(self.folder / "journal.jsonl")
        return Run(journal, self.plan, batch=self.batch, exclude=self.exclude)

    @rule(count=st.integers(1, 4))
    def good_steps(self, count):
        for _ in range(count):
            assert self.run.step() is Verdict.CONTINUE

    @rule(verdict=st.sampled_from([Verdict.SKIP, Verdict.ROLLBACK]))
    def bad_step(self, verdict):
        assert self.run.step(lambda _: verdict) is verdict

    @rule()
    def checkpoint(self):
        self.checkpoints.append(self.run.checkpoint())

    @rule(torn=st.binary(max_size=3).map(lambda text: text.replace(b"\n", b"x")))
    def crash(self, torn):
        with (self.folder / "journal.jsonl").open("ab") as file:
            file.write(torn)
        run = self._fresh()
        for checkpoint in reversed(self.checkpoints):
            try:
                run.resume(checkpoint)
                break
            except AbandonedStateError:
                continue
        run.recovery.begin(run.trainer.step)
        self.run = run

    @invariant()
    def trained_is_what_a_reader_without_the_left_out_yields(self):
        if not hasattr(self, "run"):
            return
        run, other = self.run, Reader()
        other.seek(0, run.recovery.left_out)
        expected = [other.next_batch(self.batch(n)) for n in range(run.trainer.updates)]
        assert run.trainer.weights == expected
        seen = sum(batch.count for batch in expected)
        assert seen + run.recovery.left_out.before(run.reader.position).count == run.reader.position


TestRecoveryMachine = RecoveryMachine.TestCase
TestRecoveryMachine.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
