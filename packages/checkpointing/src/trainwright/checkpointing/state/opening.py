"""Which checkpoint is loaded: the newest whose files are all there, with the reasons for others."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import attrs

from trainwright.checkpointing.errors import (
    CheckpointingWarning,
    DamagedCheckpointError,
    LoadFailedError,
    NoCheckpointError,
)
from trainwright.checkpointing.protocol import Files

from .catalog import Catalog, Saved, committed_name, read_catalog
from .index_reading import Index, check_complete
from .manifest import MANIFEST, decode_manifest
from .ranks import Ranks
from .sealed import read_whole


@attrs.frozen
class Opened:
    """A checkpoint whose files are all there, and what the ranks know together of its tensors."""

    saved: Saved
    index: Index


def open_newest(
    ranks: Ranks, files: Files, root: Path, run: str | None, step: int | None
) -> Opened:
    """Open the newest complete checkpoint; one with a file missing or short is passed over.

    Passing over is a `CheckpointingWarning` with the reason, on rank 0.

    Args:
        ranks: The ranks; each calls it with the same arguments.
        files: The file system.
        root: The folder of all checkpoints.
        run: Of which run; None: of any.
        step: Of which step; None: of any.

    Raises:
        NoCheckpointError: There is none; the message says what there is.
        LoadFailedError: A rank could not read.

    Communicates: for each one looked at a broadcast of its manifest, and what `Index` does.
    """
    doing = f"{root} was not loaded"
    choices = _Choices(files, root, run, step)
    while True:
        told = ranks.broadcast(
            ranks.agreed(lambda: choices.next(ranks.comm.rank), doing, LoadFailedError)
        )
        name, manifest = json.loads(told)
        folder = root / name
        try:
            decode = partial(decode_manifest, manifest.encode(), folder / MANIFEST)
            saved = Saved(folder, ranks.agreed(decode, doing, LoadFailedError))
            index = Index(ranks, files, saved)
        except DamagedCheckpointError as error:  # which all ranks raise
            choices.pass_over(name, str(error))
            continue
        ranks.agreed(choices.warn, doing, LoadFailedError)  # warnings may be errors
        return Opened(saved, index)


def find_newest(files: Files, root: Path, run: str | None) -> Saved | None:
    """Return the newest complete checkpoint, or None; for one process, which warns of nothing.

    Raises:
        OSError: ``root`` or a file cannot be read.
    """
    for saved in reversed(read_catalog(files, root).of_run(run)):
        if find_damage(files, saved) is None:
            return saved
    return None


def find_damage(files: Files, saved: Saved) -> str | None:
    """Return why a checkpoint is not complete, or None if it is.

    Raises:
        OSError: A file cannot be read.
    """
    try:
        check_complete(files, saved)
    except DamagedCheckpointError as error:
        return str(error)
    return None


class _Choices:
    """On rank 0, the checkpoints to try and why those before were passed over."""

    def __init__(self, files: Files, root: Path, run: str | None, step: int | None) -> None:
        self._files = files
        self._root = root
        self._run = run
        self._step = step
        self._catalog: Catalog | None = None
        self._left: Iterator[Saved] = iter(())
        self._passed: list[tuple[Path, str]] = []

    def next(self, rank: int) -> bytes:
        """Return on rank 0 the name and manifest of the next one, on others nothing."""
        if rank != 0:
            return b""
        if self._catalog is None:
            self._catalog = read_catalog(self._files, self._root)
            like = "step-" if self._step is None else committed_name(self._step, "")
            self._passed.extend(at for at in self._catalog.broken if at[0].name.startswith(like))
            self._left = reversed(self._catalog.of_run(self._run))
        for saved in self._left:
            if self._step not in (None, saved.manifest.step):
                continue
            name = saved.folder.name
            try:
                data = read_whole(self._files, saved.folder / MANIFEST)
                return json.dumps([name, data.decode("ascii")]).encode("ascii")
            except (FileNotFoundError, ValueError, DamagedCheckpointError) as error:
                self.pass_over(name, str(error))  # it went while we looked
        broken = attrs.evolve(self._catalog, broken=tuple(self._passed))
        raise NoCheckpointError(broken.describe_lack(self._run, self._step, self._root))

    def pass_over(self, name: str, reason: str) -> None:
        """Note why a checkpoint was not opened."""
        if self._catalog is not None:  # on rank 0
            self._passed.append((self._root / name, reason))

    def warn(self) -> None:
        """Say what was passed over."""
        for folder, reason in self._passed:
            warnings.warn(
                f"{folder} is not complete and was passed over: {reason}",
                CheckpointingWarning,
                stacklevel=6,
            )
