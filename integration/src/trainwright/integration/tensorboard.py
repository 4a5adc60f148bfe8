"""TensorBoard's events, beside the metrics of a run."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.integration.telling import Told
from trainwright.stability_guards import Verdict


def check_tensorboard() -> None:
    """Check that events can be written.

    Raises:
        ConfigError: the package is missing.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "--tensorboard needs the package tensorboard: pip install 'trainwright[tensorboard]', "
            "or leave it out; metrics.jsonl and `trainwright report` have the same numbers"
        )


@contextmanager
def tensorboard_events(folder: Path, done: int) -> Iterator[TensorBoard]:
    """Open a file of events, which ends with the block.

    Args:
        folder: where to; one run's events.
        done: steps that the run has made; what an earlier file tells of later ones is forgotten.

    Raises:
        ConfigError: the package is missing.
    """
    check_tensorboard()
    # Only runs that ask for it spend seconds on this import.
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None)
    try:
        yield TensorBoard(writer)
    finally:
        writer.close()


@attrs.frozen(eq=False)
class TensorBoard:
    """Writes scalars; what is not finite is left out, and text tells of interventions.

    Args:
        writer: of the events.
    """

    writer: Any

    def stepped(self, told: Told) -> None:
        """Write a step's scalars."""
        record = told.record
        values = {
            "loss/train": record.loss,
            "optimizer/grad_norm": record.grad_norm,
            "optimizer/lr": record.lr,
            "pace/tokens_per_s": told.tokens_per_s,
            "pace/step_s": record.seconds,
            "pace/mfu": told.mfu,
            "memory/peak_bytes": float(told.memory_bytes),
        }
        for name, value in values.items():
            self._write(name, value, record.step)
        if record.verdict is not Verdict.CONTINUE:
            text = f"{record.verdict.name}: {told.reason}"
            self.writer.add_text("interventions", text, record.step)

    def evaluated(self, step: int, loss: float, seconds: float | None) -> None:
        """Write the held-out loss."""
        self._write("loss/held_out", loss, step)

    def _write(self, name: str, value: float | None, step: int) -> None:
        if value is not None and math.isfinite(value):
            self.writer.add_scalar(name, value, step)
