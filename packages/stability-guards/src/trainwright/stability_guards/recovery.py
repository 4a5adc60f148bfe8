"""Going back: what SKIP, ROLLBACK and HALT mean for weights, data and the journal.

A run that recovers ends with the weights of a run whose reader never yields what was left out. The
exception is a dynamic loss scale: a step that overflows lowers it, and other scales round
elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from trainwright.stability_guards.errors import AbandonedStateError, GuardError, HaltError
from trainwright.stability_guards.journal import Intervention, Journal, left_out
from trainwright.stability_guards.positions import Positions
from trainwright.stability_guards.protocol import Guard, Report, State, Verdict
from trainwright.stability_guards.recovery_plan import BatchSource, RecoveryPlan
from trainwright.stability_guards.running import check_windows
from trainwright.stability_guards.snapshots import Snapshot

_TRIED = ((1.0, 1.0, 1), (1e30, 1e30, 1), (math.nan, math.inf, 1), (0.0, 0.0, 0))


class Recovery:
    """Judges steps and does what the verdict asks for; one on every rank.

    Between steps: ``begin`` once, then for each step ``judge`` before the update is applied, and
    ``stepped`` after it. All ranks see the same reports, so they judge alike without a word.

    - CONTINUE: apply the update.
    - SKIP: apply none; the batch counts as read, and is never read again.
    - ROLLBACK: when ``judge`` returns, the snapshot has been restored, step and update counters
      among it, and the reader stands where it stood then, with the batches to blame left out. The
      guard's statistics are those of the snapshot: they have not seen what went wrong. Repeated
      rollbacks go back further, as far as there are snapshots.
    - HALT: ``judge`` raises.

    Each is journalled before it is done, so that a run that dies at any moment and resumes from any
    checkpoint leaves out the same batches.

    Args:
        guard: what judges.
        snapshots: what is restored; not the data position, which is kept here.
        source: the reader.
        journal: of all ranks.
        plan: how far and how often; by default that of `RecoveryPlan`.
        exclude: positions to leave out from the beginning.
    """

    def __init__(
        self,
        guard: Guard,
        snapshots: Snapshot,
        source: BatchSource,
        journal: Journal,
        plan: RecoveryPlan | None = None,
        exclude: Positions | None = None,
    ) -> None:
        self._guard = guard
        self._snapshots = snapshots
        self._source = source
        self._journal = journal
        self._plan = RecoveryPlan() if plan is None else plan
        self._exclude = Positions() if exclude is None else exclude
        self._guard_state: State = guard.initial()
        self._marks: dict[int, dict[str, Any]] = {}
        self._batches: list[Positions] = []

    @property
    def left_out(self) -> Positions:
        """All positions that are never read: excluded from the beginning, or by interventions."""
        return self._exclude | left_out(self._journal)

    @property
    def reason(self) -> str:
        """The guard's words on the last step; empty where it let it continue."""
        return self._guard.reason(self._guard_state)

    def begin(self, step: int) -> None:
        """Tell the reader what to leave out, and take a snapshot if there is none.

        Call it before the first batch is read, after a checkpoint was loaded.

        Args:
            step: the step to be made next.
        """
        self._source.seek(self._source.position, self.left_out)
        if not self._usable_marks():
            self._take(step)

    def judge(self, report: Report, updates: int, note: str = "") -> Verdict:
        """Judge a step whose update has not been applied, and do what the verdict asks for.

        Args:
            report: of the step.
            updates: applied so far.
            note: what to journal beside the guard's words, such as the tensor and the rank whose
                bits differ; the same on every rank.

        Returns:
            CONTINUE, SKIP or ROLLBACK, the same on every rank.

        Raises:
            HaltError: a guard says so, there is no snapshot to go back to, or the run has gone back
                ``max_rollbacks`` times in succession; on every rank alike.
        """
        batch = self._source.last
        self._batches = [*self._batches, batch][-(self._plan.skip_before or 0) - 1 :]
        self._guard_state, verdict = self._guard.update(self._guard_state, report)
        if verdict is Verdict.CONTINUE:
            return verdict
        skipped = verdict is Verdict.SKIP and not self._plan.replay_skipped
        entry = Intervention(
            number=len(self._journal.entries),
            verdict=verdict,
            step=report.step,
            updates=updates,
            batch=batch,
            left_out=batch if skipped else Positions(),
            reason="; ".join(text for text in (self.reason, note) if text),
            loss=report.loss,
            norm=report.norm,
            position=self._source.position,
        )
        if verdict is Verdict.ROLLBACK:
            entry = self._way_back(entry)
        self._journal.append(entry)
        if entry.verdict is Verdict.HALT:
            raise HaltError(entry.reason)
        if entry.verdict is Verdict.ROLLBACK:
            self._go_back(entry)
        return entry.verdict

    def stepped(self, step: int, verdict: Verdict) -> None:
        """Take a snapshot if one is due; call it after each step.

        Args:
            step: the step to be made next.
            verdict: on the step just made; a snapshot waits for one that was applied.
        """
        newest = max(self._usable_marks(), default=None)
        due = newest is None or step >= newest + self._plan.snapshot_every
        if due and verdict is Verdict.CONTINUE:
            self._take(step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, plain JSON data; the journal is kept by itself."""
        return {
            "guard": dict(self._guard_state),
            "position": self._source.position,
            "journalled": len(self._journal.entries),
            "batches": [batch.as_json() for batch in self._batches],
            "marks": {str(step): mark for step, mark in self._marks.items()},
        }

    def load_state_dict(self, state: State) -> None:
        """Take over what a checkpoint kept; call it before anything else of it is loaded.

        Raises:
            AbandonedStateError: the checkpoint was made of training that a rollback journalled
                later has taken back; nothing has been changed, resume from an older one.
            GuardError: the state is not one of a Recovery with these guards; nothing has been
                changed.
        """
        try:
            check_not_abandoned(state, self._journal.entries)
            self._check_guard(state["guard"])
            batches = [Positions.from_json(batch) for batch in state["batches"]]
            marks = {int(step): self._mark(mark) for step, mark in state["marks"].items()}
        except GuardError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise GuardError(
                f"the state is not one of a Recovery with these guards: {error!r:.200}; resume "
                "with the guards that were saved, or without the state"
            ) from error
        self._guard_state, self._batches, self._marks = state["guard"], batches, marks

    def _mark(self, mark: Any) -> dict[str, Any]:
        self._check_guard(mark["guard"])
        for batch in mark["batches"]:
            Positions.from_json(batch)
        _count(mark, "position")
        return dict(mark)

    def _check_guard(self, state: State) -> None:
        check_windows(state)
        self._guard.reason(state)
        # A guard leaves its arguments alone, so that a try tells whether it can go on from these.
        for loss, norm, tokens in _TRIED:
            after, _ = self._guard.update(state, Report(0, loss, norm, tokens=tokens))
            self._guard.reason(after)

    def _take(self, step: int) -> None:
        # Marked first, for snapshots that store this object's state too.
        self._marks = {
            **self._usable_marks(),
            step: {
                "position": self._source.position,
                "guard": dict(self._guard_state),
                "batches": [batch.as_json() for batch in self._batches],
            },
        }
        self._snapshots.take(step)
        self._marks = self._usable_marks()

    def _usable_marks(self) -> dict[int, dict[str, Any]]:
        return {step: self._marks[step] for step in self._snapshots.steps if step in self._marks}

    def _way_back(self, entry: Intervention) -> Intervention:
        """Return the entry of a ROLLBACK, or that of the HALT in its place."""
        attempt = _attempt(entry, self._journal.entries, self._plan.settled_after)
        if attempt > self._plan.max_rollbacks:
            reason = (
                f"{entry.reason}; the run has gone back {self._plan.max_rollbacks} times in "
                "succession, which is max_rollbacks: look at the data, or lower the learning rate"
            )
            return attrs.evolve(entry, verdict=Verdict.HALT, reason=reason)
        marks = self._usable_marks()
        if not marks:
            reason = f"{entry.reason}; there is no snapshot to go back to"
            return attrs.evolve(entry, verdict=Verdict.HALT, reason=reason)
        blamed = Positions(span for batch in self._batches for span in batch.spans)
        first = blamed.spans[0][0] if blamed else entry.position
        old_enough = sorted(step for step in marks if marks[step]["position"] <= first)
        step = old_enough[-min(attempt, len(old_enough))] if old_enough else min(marks)
        start = marks[step]["position"]
        if self._plan.skip_before is None:
            blamed = Positions([(start, entry.position)])
        # What was trained before the oldest snapshot stays trained, and is no part of the list.
        return attrs.evolve(
            entry,
            left_out=blamed.from_position(start),
            back_to=step,
            position=start,
            attempt=attempt,
        )

    def _go_back(self, entry: Intervention) -> None:
        step = entry.back_to
        assert step is not None
        mark = self._marks[step]
        self._snapshots.restore(step)
        self._guard_state = mark["guard"]
        self._batches = [Positions.from_json(batch) for batch in mark["batches"]]
        self._marks = {s: kept for s, kept in self._marks.items() if s <= step}
        self._source.seek(entry.position, self.left_out)


def check_not_abandoned(state: State, entries: Sequence[Intervention]) -> None:
    """Make sure that no rollback journalled after a checkpoint has taken back what it holds.

    Args:
        state: what `Recovery.state_dict` gave when the checkpoint was made.
        entries: of the journal now.

    Raises:
        AbandonedStateError: one has; the message says which.
        GuardError: the journal is shorter than it was then, so it is not the checkpoint's; or the
            state is none.
    """
    known, position = (_count(state, name) for name in ("journalled", "position"))
    if len(entries) < known:
        raise GuardError(
            f"the checkpoint was made after {known} interventions, but the journal has "
            f"{len(entries)}: keep the journal with the checkpoints"
        )
    for entry in entries[known:]:
        if entry.verdict is Verdict.ROLLBACK and position > entry.position:
            raise AbandonedStateError(
                f"the checkpoint stands at data position {position}, but intervention "
                f"{entry.number} went back to {entry.position} from step {entry.step}: resume from "
                f"one at step {entry.back_to} or before"
            )


def _attempt(entry: Intervention, entries: Sequence[Intervention], settled_after: int) -> int:
    rollbacks = [other for other in entries if other.verdict is Verdict.ROLLBACK]
    if not rollbacks or entry.updates > rollbacks[-1].updates + settled_after:
        return 1
    return rollbacks[-1].attempt + 1


def _count(state: State, name: str) -> int:
    found = state.get(name) if isinstance(state, Mapping) else None
    if type(found) is not int or found < 0:
        raise GuardError(f"the state of a Recovery must hold {name}, a whole number, got {found!r}")
    return found
