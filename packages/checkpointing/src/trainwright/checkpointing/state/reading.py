"""A checkpoint open for reading by one process: what it holds, and single tensors of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from trainwright.checkpointing.errors import DamagedCheckpointError, MismatchError
from trainwright.checkpointing.protocol import Files
from trainwright.collectives import ShardSpec

from .catalog import Saved, read_catalog
from .files import LocalFiles
from .header import TensorInfo
from .loading import OpenFiles, Want, fill_all
from .manifest import file_name
from .tree import TensorLeaf


@attrs.frozen
class StoredPiece:
    """A part of a tensor and the name of the file, in the checkpoint's folder, that holds it."""

    file: str
    spec: ShardSpec


@attrs.frozen
class TensorEntry:
    """What a checkpoint says of one tensor; no element of it has been read.

    Args:
        name: The path in the tree that was saved, keys joined by ``/``.
        dtype: The dtype.
        shape: The shape of the whole tensor.
        pieces: Which file holds what; together each element once.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """One complete checkpoint, open for reading by one process; `open_checkpoint` makes it.

    It is a context manager that closes its files. The names of its tensors are read when `tensors`
    is first looked at, and their elements by `read` only.

    Args:
        files: The file system.
        saved: The checkpoint's folder and manifest.
    """

    def __init__(self, files: Files, saved: Saved) -> None:
        self._saved = saved
        self._files = OpenFiles(files, saved.folder, saved.manifest)
        self._plain: dict[str, Any] | None = None
        self._tensors: _Entries | None = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return self._saved.folder

    @property
    def step(self) -> int:
        """The step that it was saved as."""
        return self._saved.manifest.step

    @property
    def run(self) -> str:
        """The run that saved it."""
        return self._saved.manifest.run

    @property
    def plain(self) -> dict[str, Any]:
        """The plain values by path.

        Raises:
            DamagedCheckpointError: One is not what was written.
        """
        if self._plain is None:
            self._plain = self._saved.manifest.decode_plain(self.folder)
        return self._plain

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """What is said of each tensor, by path and in the order of the paths.

        Raises:
            OSError: A file cannot be read.
            DamagedCheckpointError: A file is not what was written.
        """
        return self._entries()

    def read(self, name: str, spec: ShardSpec | None = None) -> torch.Tensor:
        """Return a tensor of the checkpoint, or the part of it that ``spec`` describes.

        Only the blocks of files that hold the part are read, and each is verified.

        Args:
            name: Its path.
            spec: Which part, of ``spec.local_shape``; None: the whole tensor.

        Returns:
            A new tensor on the CPU.

        Raises:
            MismatchError: There is no such tensor, or ``spec`` is of another shape.
            OSError: A file cannot be read.
            DamagedCheckpointError: A file is not what was written.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise MismatchError(f"{self.folder.name} holds no tensor {name!r}")
        part = ShardSpec.full(name, entry.shape) if spec is None else spec
        if part.global_shape != entry.shape:
            raise MismatchError(
                f"{name}: expected a spec of the shape {entry.shape}, found {part.global_shape}"
            )
        tensor = torch.empty(part.local_shape, dtype=entry.dtype)
        want = Want(TensorLeaf(name, tensor, part, everywhere=False))
        for number, info in self._entries().found(name):
            want.add(number, info)
        hole = want.check_holes()
        if hole is not None:
            raise DamagedCheckpointError(f"{self.folder} is damaged: {name}: {hole}")
        fill_all(self._files, [want])
        return tensor

    def close(self) -> None:
        """Close the files; a later `read` opens them again."""
        self._files.__exit__()

    def _entries(self) -> _Entries:
        if self._tensors is None:
            self._tensors = _Entries(self._files)
        return self._tensors


def open_checkpoint(
    root: str | Path, step: int | None = None, run: str | None = None, files: Files | None = None
) -> Checkpoint:
    """Open a complete checkpoint for reading, in one process and without a target to fill.

    Args:
        root: The folder of all checkpoints, as `StateStore` has it.
        step: Which one; None: the newest.
        run: Of which run; None: of any.
        files: The file system; None: the computer's own.

    Raises:
        NoCheckpointError: There is no such complete checkpoint.
        OSError: ``root`` cannot be read.
    """
    place = Path(root).absolute()
    system = files if files is not None else LocalFiles()
    return Checkpoint(system, read_catalog(system, place).choose(run, step, place))


class _Entries(Mapping[str, TensorEntry]):
    def __init__(self, files: OpenFiles) -> None:
        self._infos: dict[str, list[tuple[int, TensorInfo]]] = {}
        for number, file in files.nearest_first(0):
            for name, info in file.tensors.items():
                self._infos.setdefault(name, []).append((number, info))

    def found(self, name: str) -> list[tuple[int, TensorInfo]]:
        return self._infos[name]

    def __getitem__(self, name: str) -> TensorEntry:
        infos = self._infos[name]
        first = infos[0][1]
        pieces = (StoredPiece(file_name(number), info.spec) for number, info in infos)
        return TensorEntry(name, first.dtype, first.spec.global_shape, tuple(pieces))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._infos))

    def __len__(self) -> int:
        return len(self._infos)
