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
from trainwright.collectives import ShardSpec, SingleCommunicator

from .catalog import Saved, read_catalog
from .files import LocalFiles
from .filling import DataFiles, fill
from .index import Located
from .index_reading import Index
from .manifest import file_name
from .matching import Place, Want, find_hole, places_of
from .ranks import Ranks
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
        alias_of: The first name of those that share its pieces, if that is not its own: they were
            tied, and it is stored once.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]
    alias_of: str | None = None

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
        self._files = files
        self._data = DataFiles(files, saved.folder)
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
            LoadFailedError: A file cannot be read.
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
        located = self._entries().find(name)
        if located is None:
            raise MismatchError(f"{self.folder.name} holds no tensor {name!r}")
        part = ShardSpec.full(name, located.global_shape) if spec is None else spec
        if part.global_shape != located.global_shape:
            raise MismatchError(
                f"{name}: expected a spec of the shape {located.global_shape}, "
                f"found {part.global_shape}"
            )
        hole = find_hole(part, located)
        if hole is not None:  # before memory is taken for what the index only claims
            raise DamagedCheckpointError(f"{self.folder} is damaged: {name}: {hole}")
        tensor = torch.empty(part.local_shape, dtype=located.dtype, device="cpu")
        leaf = TensorLeaf(name, tensor, part, everywhere=False)
        fill(self._data, Want(leaf, located))
        return tensor

    def close(self) -> None:
        """Close the files; a later `read` opens them again."""
        self._data.close()

    def _entries(self) -> _Entries:
        if self._tensors is None:
            index = Index(Ranks(SingleCommunicator()), self._files, self._saved)
            located = index.locate(dict.fromkeys(index.names))
            self._tensors = _Entries(located)
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
    def __init__(self, located: Mapping[str, Located | None]) -> None:
        self._located = {name: found for name, found in sorted(located.items()) if found}
        self._first: dict[tuple[Place, ...], str] = {}
        for name, found in self._located.items():
            self._first.setdefault(tuple(places_of(found)), name)

    def find(self, name: str) -> Located | None:
        return self._located.get(name)

    def __getitem__(self, name: str) -> TensorEntry:
        located = self._located[name]
        pieces = tuple(StoredPiece(file_name(x.file.number), x.spec) for x in located.pieces)
        places = tuple(places_of(located))
        first = self._first[places] if places else name
        alias_of = None if first == name else first
        return TensorEntry(name, located.dtype, located.global_shape, pieces, alias_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._located)

    def __len__(self) -> int:
        return len(self._located)
