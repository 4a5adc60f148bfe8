"""Checkpoints while a run goes on, and at its end."""

from __future__ import annotations

import attrs

from trainwright.checkpointing.state import StateStore
from trainwright.integration.parts import Parts, Progress
from trainwright.integration.recipe import StepRecord
from trainwright.integration.training_state import save_state
from trainwright.stability_guards import Verdict


@attrs.define(eq=False)
class Saver:
    """Observes the steps and saves the state after every so many.

    However few checkpoints are kept, those stay that a run would resume from which is killed after
    a rollback: of each snapshot that it may go back to, the last one before.

    Args:
        store: where checkpoints go.
        parts: whose state is saved.
        progress: how far the run has come.
        saved: the step of the newest checkpoint, if there is one.
    """

    store: StateStore
    parts: Parts
    progress: Progress
    saved: int | None = None
    _steps: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._steps = [] if self.saved is None else [self.saved]

    def __call__(self, record: StepRecord) -> None:
        """Save if the step is due.

        Raises:
            CheckpointingError: this save, or the one before it, failed; on every rank.
        """
        every = self.parts.config.saving.save_every
        # A state whose step was skipped may be the broken one: the checkpoint before it stays.
        is_due = record.step % max(every, 1) == 0 and record.verdict is Verdict.CONTINUE
        # What a rollback has taken back cannot be resumed, and older ones may be gone.
        is_taken_back = self.saved is not None and self.saved > self.progress.step
        if every and (is_due or is_taken_back):
            self._save(asynchronous=self.parts.config.saving.async_save)

    def finish(self) -> None:
        """Save what the last step has left, unless that is done; returns once it is safe.

        Raises:
            CheckpointingError: this save, or the one before it, failed; on every rank.
        """
        if self.saved != self.progress.step:
            self._save(asynchronous=False)
        self.store.close()

    def _save(self, *, asynchronous: bool) -> None:
        marks = [int(step) for step in self.progress.guard_state.get("marks", ())]
        before = [[step for step in self._steps if step <= mark] for mark in marks]
        save_state(
            self.store,
            self.parts,
            self.progress,
            protect={max(steps) for steps in before if steps},
            asynchronous=asynchronous,
        )
        self.saved = self.progress.step
        # Of training that was made again the checkpoints made before are nothing to go back to.
        self._steps = [*(step for step in self._steps if step < self.saved), self.saved]
