"""Serial runs that many tests compare with, made once by the worker that needs them first."""

from __future__ import annotations

import fcntl
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from tests.serial import Outcome, SerialRun, Snapshot, settings
from trainwright.integration.model import ModelShape

STEPS = (0, 1, 5, 20, 50)
"""After these the whole state of a serial run is loaded into layouts."""

folder: Path | None = None
"""Where the workers of one test run keep what they made; set by a fixture."""


@attrs.frozen(eq=False)
class SerialHistory:
    """What a serial run did.

    Args:
        steps: The state before each of `STEPS` and what that step computed.
        losses: Of every step.
        norms: Of every step.
    """

    steps: dict[int, tuple[Snapshot, Outcome]]
    losses: tuple[float, ...]
    norms: tuple[float, ...]


@functools.cache
def serial_history(dtype: str, shape: ModelShape, splits: int = 1) -> SerialHistory:
    """Return 51 steps of the serial run, whose batch is taken in ``splits`` parts."""
    name = f"{dtype} {splits} {attrs.astuple(shape)}"
    made: SerialHistory = _kept(name, lambda: _make(dtype, shape, splits))
    return made


def serial_steps(dtype: str, shape: ModelShape) -> dict[int, tuple[Snapshot, Outcome]]:
    """Return the states of the serial run to start from, and what it computed next."""
    return serial_history(dtype, shape).steps


def _make(dtype: str, shape: ModelShape, splits: int) -> SerialHistory:
    run = SerialRun(shape, settings(dtype=dtype), splits)
    steps: dict[int, tuple[Snapshot, Outcome]] = {}
    outcomes = []
    for step in range(max(STEPS) + 1):
        before = run.snapshot() if step in STEPS and splits == 1 else None
        outcomes.append(run.step())
        if before is not None:
            steps[step] = (before, outcomes[-1])
    return SerialHistory(steps, tuple(o.loss for o in outcomes), tuple(o.norm for o in outcomes))


def _kept(name: str, make: Callable[[], Any]) -> Any:
    """Return what ``make`` gives, from a file where another worker has made it already."""
    if folder is None:
        return make()
    path = folder / hashlib.sha256(name.encode()).hexdigest()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = make()
            aside = path.with_suffix(".tmp")
            torch.save(made, aside)
            aside.rename(path)
            return made
    return torch.load(path, weights_only=False)
