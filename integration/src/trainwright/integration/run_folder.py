"""The folder of a run: identity, settings, metrics, checkpoints, plot."""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import attrs

from trainwright.integration.aside import write_aside
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import RunFolderError
from trainwright.integration.kept_origin import CONFIG as CONFIG
from trainwright.integration.kept_origin import DATA as DATA
from trainwright.integration.kept_origin import keep_origin, own_settings
from trainwright.integration.outside_files import number, parse_json, read_object

IDENTITY = "run.json"
LOCK = "lock"
WRITER = "lock.first-rank"
METRICS = "metrics.jsonl"
SUPERSEDED = "metrics.superseded.jsonl"
MEASURED = "measured.jsonl"
ABOUT = "about.json"
SUMMARY = "summary.json"
TENSORBOARD = "tensorboard"
JOURNAL = "journal.jsonl"
CHECKPOINTS = "checkpoints"
PLOT = "loss.png"


@attrs.frozen
class Identity:
    """What tells a run from all others, and its data from other data.

    Args:
        run: name of the run in its checkpoints.
        data: checksum of the data that the run reads.
    """

    run: str
    data: str


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
            # A journal that is left says what not to read, of other data perhaps.
            left = (self.path / CONFIG, self.path / JOURNAL, self.metrics, self.checkpoints)
            return any(path.exists() for path in left)
        except OSError as error:
            raise RunFolderError(f"cannot look into {self.path}: {error}") from error

    def check_free(self) -> None:
        """Check that a run can begin here.

        Raises:
            RunFolderError: the folder already holds a run, or is a file.
        """
        if self.holds_run:
            raise RunFolderError(
                f"{self.path} already holds a run; continue it with --resume {self.path}, "
                "or give another --out"
            )
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"--out {self.path} is a file; give a folder, or a new name")

    def create(self, config: RunConfig, data: str) -> None:
        """Begin a new run here; `lock` has made the folder.

        Args:
            config: its settings.
            data: the checksum of its data.

        Raises:
            RunFolderError: the folder already holds a run, or cannot be written.
        """
        self.check_free()
        try:
            self._identify(Identity(run=secrets.token_hex(8), data=data))
            keep_origin(self.path, config)
            # The last thing written: with it the folder holds a run.
            config.save(self.path / CONFIG)
        except OSError as error:
            raise RunFolderError(f"cannot write the run folder {self.path}: {error}") from error

    def lock(self, name: str = LOCK, patience_s: float = 0.0) -> IO[str]:
        """Keep other runs out of this folder until the returned file is closed.

        The lock ends with the process that holds it, however that ends.

        Args:
            name: ``lock`` is held from before the first rank starts until after the last has
                ended. Where what started the ranks is killed they live on for a moment: so the
                first rank holds ``lock.first-rank`` besides.
            patience_s: how long to wait for the holder to go.

        Raises:
            RunFolderError: another run holds the folder.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / name).open("a+")
        except OSError as error:
            raise RunFolderError(f"cannot write the run folder {self.path}: {error}") from error
        end = time.monotonic() + patience_s
        while not _locked(file):
            if time.monotonic() >= end:
                file.seek(0)
                holder = file.read().strip() or "of an unknown process"
                file.close()
                raise RunFolderError(
                    f"another run is writing to {self.path} ({holder}); wait for it, or stop it "
                    "first"
                )
            time.sleep(0.05)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return file

    def identity(self) -> Identity:
        """Return whose folder this is.

        Raises:
            RunFolderError: that cannot be read.
        """
        path = self.path / IDENTITY
        try:
            values = read_object(path)
            return Identity(run=str(values["run"]), data=str(values["data"]))
        except (OSError, ValueError, KeyError) as error:
            raise RunFolderError(f"cannot read whose run {self.path} holds: {error}") from error

    def check_data(self, data: str, source: str, *, allow_other: bool) -> None:
        """Check that a resumed run reads what it read before.

        Args:
            data: the checksum of what it would read now.
            source: where that is, for the message.
            allow_other: take other data, from now on, instead of refusing it.

        Raises:
            RunFolderError: it is other data.
        """
        identity = self.identity()
        if identity.data == data:
            return
        if not allow_other:
            raise RunFolderError(
                f"{source} is not the data that the run in {self.path} was trained on (SHA-256 "
                f"{data[:12]}…, expected {identity.data[:12]}…), so that its position in the data "
                "would mean another place; give the same data with --data, or --allow-other-data"
            )
        self._identify(attrs.evolve(identity, data=data))

    def config(self) -> RunConfig:
        """Return the settings the run was begun with.

        Raises:
            RunFolderError: the folder holds no run.
        """
        if not os.path.exists(self.path / CONFIG):
            raise RunFolderError(f"{self.path} holds no run to resume: {CONFIG} is missing")
        return own_settings(self.path, RunConfig.load(self.path / CONFIG))

    def rewind(self, step: int) -> None:
        """Forget what is known of steps after ``step``: the resumed run makes these steps again.

        Their metrics are moved aside; what was measured of the ranks and the summary are dropped.
        """
        _cut(self.metrics, step, self._set_aside)
        _cut(self.path / MEASURED, step)
        (self.path / SUMMARY).unlink(missing_ok=True)

    def _set_aside(self, superseded: list[str]) -> None:
        with (self.path / SUPERSEDED).open("a") as file:
            file.writelines(superseded)
            file.flush()
            os.fsync(file.fileno())

    def losses(self) -> tuple[list[int], list[float]]:
        """Return the steps and losses recorded so far."""
        if not self.metrics.exists():
            return [], []
        # A step that was made again after a rollback counts as it was made last.
        losses: dict[int, float] = {}
        for line in self.metrics.read_text(errors="replace").split("\n"):
            row = _row_of(line)
            if "loss" in row:
                losses[int(row["step"])] = number(row["loss"])
        steps = sorted(losses)
        return steps, [losses[step] for step in steps]

    def _identify(self, identity: Identity) -> None:
        write_aside(self.path / IDENTITY, json.dumps(attrs.asdict(identity), indent=2) + "\n")


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunFolderError(f"cannot lock {file.name}: {error}") from error
    return True


def _cut(path: Path, step: int, first: Callable[[list[str]], None] = lambda lines: None) -> None:
    """Take the lines of steps after ``step`` out of a file, once ``first`` has seen them."""
    if not path.exists():
        return
    kept: list[str] = []
    taken: list[str] = []
    text = path.read_text(errors="replace")
    # An empty file has no line, not an empty one.
    for line in text.removesuffix("\n").split("\n") if text else ():
        (kept if _step_of(line) <= step else taken).append(line + "\n")
    if taken:
        first(taken)
    if taken or (text and not text.endswith("\n")):
        write_aside(path, "".join(kept))


def _step_of(line: str) -> float:
    # A line torn by a crash counts as one after the checkpoint.
    return float(_row_of(line).get("step", math.inf))


def _row_of(line: str) -> dict[str, Any]:
    """Return what a line says of a step; nothing where it is torn or damaged."""
    try:
        row = parse_json(line)
    except ValueError:
        return {}
    is_one = isinstance(row, dict) and 0 <= number(row.get("step")) < 2**53
    return row if is_one else {}
