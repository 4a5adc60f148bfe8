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

    def __call__(self, record: StepRecord) -> None:
        """Save if the step is due.

        Raises:
            CheckpointingError: this save, or the one before it, failed; on every rank.
        """
        every = self.parts.config.save_every
        # A state whose step was skipped may be the broken one: the checkpoint before it stays.
        if every and record.step % every == 0 and record.verdict is Verdict.CONTINUE:
            self._save(asynchronous=self.parts.config.async_save)

    def finish(self) -> None:
        """Save what the last step has left, unless that is done; returns once it is safe.

        Raises:
            CheckpointingError: this save, or the one before it, failed; on every rank.
        """
        if self.saved != self.progress.step:
            self._save(asynchronous=False)
        self.store.close()

    def _save(self, *, asynchronous: bool) -> None:
        save_state(self.store, self.parts, self.progress, asynchronous=asynchronous)
        self.saved = self.progress.step
