"""The folder of a run: settings, metrics, checkpoints, plot."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO

import attrs

from trainwright.integration.config import RunConfig
from trainwright.integration.errors import RunFolderError

CONFIG = "config.json"
LOCK = "lock"
METRICS = "metrics.jsonl"
SUPERSEDED = "metrics.superseded.jsonl"
CHECKPOINTS = "checkpoints"
PLOT = "loss.png"


@attrs.frozen
class RunFolder:
    """Where a run keeps its files; only the first rank writes, but for checkpoints."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoint store."""
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        """File with one JSON object a step."""
        return self.path / METRICS

    @property
    def plot(self) -> Path:
        """Picture of the loss curve."""
        return self.path / PLOT

    @property
    def holds_run(self) -> bool:
        """Whether a run has begun here."""
        try:
            return any(p.exists() for p in (self.path / CONFIG, self.metrics, self.checkpoints))
        except OSError as error:
            raise RunFolderError(f"cannot look into {self.path}: {error}") from error

    def create(self, config: RunConfig) -> None:
        """Begin a new run here.

        Raises:
            RunFolderError: the folder already holds a run, or cannot be written.
        """
        if self.holds_run:
            raise RunFolderError(
                f"{self.path} already holds a run; continue it with --resume {self.path}, "
                "or give another --out"
            )
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"--out {self.path} is a file; give a folder, or a new name")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            config.save(self.path / CONFIG)
        except OSError as error:
            raise RunFolderError(f"cannot write the run folder {self.path}: {error}") from error

    def lock(self) -> IO[str]:
        """Keep other runs out of this folder until the returned file is closed.

        The lock ends with the process that holds it, however that ends.

        Raises:
            RunFolderError: another run holds the folder.
        """
        try:
            file = (self.path / LOCK).open("a")
        except OSError as error:
            raise RunFolderError(f"cannot write the run folder {self.path}: {error}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise RunFolderError(
                f"another run is writing to {self.path}; wait for it, or stop it first"
            ) from error
        return file

    def config(self) -> RunConfig:
        """Return the settings the run was begun with.

        Raises:
            RunFolderError: the folder holds no run.
        """
        if not (self.path / CONFIG).exists():
            raise RunFolderError(f"{self.path} holds no run to resume: {CONFIG} is missing")
        return RunConfig.load(self.path / CONFIG)

    def rewind(self, step: int) -> None:
        """Move metrics of steps after ``step`` aside: the resumed run makes these steps again."""
        if not self.metrics.exists():
            return
        kept: list[str] = []
        superseded: list[str] = []
        text = self.metrics.read_text(errors="replace")
        for line in text.splitlines():
            (kept if _step_of(line) <= step else superseded).append(line + "\n")
        if superseded:
            with (self.path / SUPERSEDED).open("a") as file:
                file.writelines(superseded)
                file.flush()
                os.fsync(file.fileno())
        if superseded or not text.endswith("\n"):
            aside = self.metrics.with_suffix(".tmp")
            aside.write_text("".join(kept))
            aside.replace(self.metrics)

    def losses(self) -> tuple[list[int], list[float]]:
        """Return the steps and losses recorded so far."""
        if not self.metrics.exists():
            return [], []
        lines = self.metrics.read_text(errors="replace").splitlines()
        rows = [json.loads(line) for line in lines if _step_of(line) < float("inf")]
        losses = [float("nan") if row["loss"] is None else row["loss"] for row in rows]
        return [row["step"] for row in rows], losses


def _step_of(line: str) -> float:
    # A line torn by a crash counts as one after the checkpoint.
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
