"""Looks at checkpoints without a model: what is there, and whether it is intact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch

from trainwright.checkpointing.errors import CheckpointingError, LoadFailedError, NoCheckpointError
from trainwright.checkpointing.protocol import Files
from trainwright.collectives import ShardSpec

from .catalog import Saved, read_catalog
from .comparing import Contents, Readable
from .dtypes import dtype_name
from .files import LocalFiles
from .index_reading import check_complete
from .loading import OpenFiles
from .manifest import MANIFEST, read_manifest
from .reading import Checkpoint

T = TypeVar("T")


@attrs.frozen
class Health:
    """What a full read of one checkpoint has found.

    Args:
        folder: The checkpoint's folder.
        problems: What is wrong; each names a file. None: it is what was written.
        num_bytes: Bytes of the files whose checksums were compared.
    """

    folder: Path
    problems: tuple[str, ...]
    num_bytes: int


def open_place(
    place: str | Path, step: int | None = None, run: str | None = None, files: Files | None = None
) -> Checkpoint:
    """Open a checkpoint for reading, by its own folder or by the folder of all checkpoints.

    Args:
        place: Either of the two.
        step: Which one, in a folder of several; None: the newest.
        run: Of which run; None: of any.
        files: The file system; None: the computer's own.

    Raises:
        NoCheckpointError: There is no such complete checkpoint.
        DamagedCheckpointError: Its manifest is not what was written.
        LoadFailedError: It cannot be read.
    """
    system = files if files is not None else LocalFiles()
    saved = _readable(place, lambda: _find(system, Path(place).absolute(), step, run))
    return Checkpoint(system, saved)


def list_checkpoints(
    root: str | Path, run: str | None = None, files: Files | None = None
) -> tuple[list[Saved], list[tuple[Path, str]]]:
    """Return the complete checkpoints in the order of saving, and (folder, reason) of the broken.

    Raises:
        NoCheckpointError: There is neither.
        LoadFailedError: The folder cannot be read.
    """
    system, place = files if files is not None else LocalFiles(), Path(root).absolute()
    catalog = _readable(root, lambda: read_catalog(system, place))
    complete, broken = list(catalog.of_run(run)), list(catalog.broken)
    if not complete and not broken:
        of_run = "" if run is None else f" of run {run!r}"
        raise NoCheckpointError(f"{root} holds no checkpoint{of_run}")
    return complete, broken


def examine(
    place: str | Path, step: int | None = None, run: str | None = None, files: Files | None = None
) -> tuple[Health, ...]:
    """Read whole checkpoints and compare every checksum.

    Args:
        place: A checkpoint's folder, or the folder of all checkpoints.
        step: Which step; None: all of them, also those that are not complete.
        run: Of which run; None: of all.
        files: The file system; None: the computer's own.

    Raises:
        NoCheckpointError: There is nothing to examine.
        LoadFailedError: The folder cannot be read.
    """
    system, path = files if files is not None else LocalFiles(), Path(place).absolute()
    if MANIFEST in _readable(place, lambda: system.names(path)) or step is not None:
        try:
            saved = _readable(place, lambda: _find(system, path, step, run))
        except NoCheckpointError:
            raise
        except CheckpointingError as error:
            return (Health(path, (str(error),), 0),)
        return (_examine_one(system, saved),)
    complete, broken = list_checkpoints(path, run, system)
    return (
        *(_examine_one(system, saved) for saved in complete),
        *(Health(folder, (reason,), 0) for folder, reason in broken),
    )


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a checkpoint says of itself as plain values that JSON can hold.

    Raises:
        DamagedCheckpointError: A file is not what was written.
    """
    tensors: dict[str, dict[str, Any]] = {
        name: {
            "dtype": dtype_name(entry.dtype),
            "shape": list(entry.shape),
            "bytes": entry.num_bytes,
            "alias_of": entry.alias_of,
            "pieces": [
                {
                    "file": piece.file,
                    "boxes": [[list(b.start), list(b.stop)] for b in piece.spec.boxes],
                    "range": [piece.spec.start, piece.spec.stop],
                }
                for piece in entry.pieces
            ],
        }
        for name, entry in checkpoint.tensors.items()
    }
    return {
        "folder": str(checkpoint.folder),
        "run": checkpoint.run,
        "step": checkpoint.step,
        "files": sorted({piece["file"] for t in tensors.values() for piece in t["pieces"]}),
        "tensors": tensors,
        "plain": checkpoint.plain,
    }


def contents_of(checkpoint: Checkpoint) -> Contents:
    """Return the contents of one of our checkpoints, which has to stay open."""
    tensors: dict[str, Readable] = {}
    for name, entry in checkpoint.tensors.items():
        stored = _Stored(checkpoint, name, entry.dtype, entry.shape)
        # Names of one tensor have one object here, by which a conversion sees that they are tied.
        tensors[name] = tensors.get(entry.alias_of or name, stored)
    return Contents(tensors, checkpoint.plain)


@attrs.frozen
class _Stored:
    checkpoint: Checkpoint
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, spec: ShardSpec) -> torch.Tensor:
        return _readable(self.checkpoint.folder, lambda: self.checkpoint.read(self.name, spec))


def _find(files: Files, place: Path, step: int | None, run: str | None) -> Saved:
    if MANIFEST not in files.names(place):
        return read_catalog(files, place).choose(run, step, place)
    saved = Saved(place, read_manifest(files, place))
    if step not in (None, saved.manifest.step) or run not in (None, saved.manifest.run):
        raise NoCheckpointError(
            f"{place} is step {saved.manifest.step} of run {saved.manifest.run!r}"
        )
    return saved


def _examine_one(system: Files, saved: Saved) -> Health:
    problems: dict[str, None] = {}
    num_bytes = 0

    try:
        _readable(saved.folder, lambda: check_complete(system, saved))
    except CheckpointingError as error:
        problems[str(error)] = None
    with OpenFiles(system, saved.folder, saved.manifest) as files:
        for number in range(len(files)):
            try:
                num_bytes += _readable(saved.folder, partial(_verify_file, files, number))
            except CheckpointingError as error:
                problems[str(error)] = None
    return Health(saved.folder, tuple(problems), num_bytes)


def _verify_file(files: OpenFiles, number: int) -> int:
    file = files.get(number)
    if file is None:
        return 0
    file.verify()
    return sum(info.end - info.begin for info in file.tensors.values())


def _readable(place: str | Path, work: Callable[[], T]) -> T:
    try:
        return work()
    except OSError as error:
        raise LoadFailedError(f"{place} cannot be read: {error}") from error
