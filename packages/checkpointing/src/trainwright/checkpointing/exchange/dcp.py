"""Folders of PyTorch's distributed checkpoint (DCP), read without running anything they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch

from trainwright.checkpointing.errors import (
    DamagedCheckpointError,
    NoCheckpointError,
    NotAvailableYetError,
)
from trainwright.checkpointing.protocol import Files
from trainwright.checkpointing.state.dtypes import is_storable, require_little_endian
from trainwright.collectives import Box

from .archive import Archive
from .dcp_metadata import DcpMetadata, Span, TensorEntry, parse_dcp_metadata
from .lazy import LazyObject, LazyTensor, Piece, Source
from .objects import read_object
from .readers import Folder
from .saved_tensor import SavedTensor
from .showing import show
from .strided import Strided

METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 30


def open_dcp(
    folder: str | Path,
    *,
    verify: bool = True,
    files: Files | None = None,
    follow_links: bool = False,
) -> Source:
    """Return what a DCP folder holds; tensors are read when they are asked for.

    The pickles in it are read as data: a file that asks for any class but those that DCP itself
    writes is refused, and nothing it names is imported or called.

    Args:
        folder: The folder, with ``.metadata`` and the files it names.
        verify: Whether the checksum of a piece is compared before its first use, for which all of
            it is read; otherwise only the bytes that are needed.
        files: The file system; None: this machine's.
        follow_links: Whether files may be links that lead out of the folder.

    Raises:
        NoCheckpointError: There is no such folder, or no checkpoint in it.
        UntrustedError: A file asks for more than data, or a name leads out of the folder.
        DamagedCheckpointError: Files are missing, too short, or contradict each other.
        NotAvailableYetError: The version, a dtype or a layout is not known.
    """
    require_little_endian()
    opened = Folder(Path(folder), files, follow_links)
    try:
        names = opened.names()
        if METADATA not in names:
            raise _no_metadata(opened.path, names)
        data = opened.read(METADATA, _MAX_METADATA_BYTES)
        metadata = parse_dcp_metadata(data, opened.path / METADATA)
        _check_spans(opened, metadata)
    except BaseException:
        opened.close()
        raise
    tensors = {
        name: _tensor(opened, name, entry, verify) for name, entry in metadata.tensors.items()
    }
    objects = {name: _object(opened, name, span) for name, span in metadata.objects.items()}
    return Source(tensors, objects, metadata.paths, {}, opened.close)


def _no_metadata(folder: Path, names: list[str]) -> Exception:
    if any(name.startswith("__") and name.endswith(METADATA) for name in names):
        return NotAvailableYetError(
            f"{folder} was saved with use_collectives=False, one .metadata a rank, which cannot be "
            "read; save it again with collectives"
        )
    return NoCheckpointError(
        f"{folder} holds no {METADATA}: it is no DCP folder, or its save never ended"
    )


def _check_spans(folder: Folder, metadata: DcpMetadata) -> None:
    spans = [span for entry in metadata.tensors.values() for _, span in entry.pieces]
    sizes: dict[str, int] = {}
    for span in [*spans, *metadata.objects.values()]:
        if span.file not in sizes:
            sizes[span.file] = folder.file(span.file).size
        if span.offset + span.length > sizes[span.file]:
            raise DamagedCheckpointError(
                f"{folder.path / span.file} is damaged: expected at least "
                f"{span.offset + span.length} bytes, found {sizes[span.file]}"
            )


def _tensor(folder: Folder, name: str, entry: TensorEntry, verify: bool) -> LazyTensor:
    if not is_storable(entry.dtype):
        raise NotAvailableYetError(f"{folder.path}: {show(name)}: {entry.dtype} cannot be read")
    pieces = tuple(
        Piece(box, _PieceReader(folder, name, entry.dtype, box.shape, span, verify).copy)
        for box, span in entry.pieces
    )
    return LazyTensor(name, entry.dtype, entry.shape, pieces, str(folder.path))


def _object(folder: Folder, name: str, span: Span) -> LazyObject:
    def read() -> Any:
        return read_object(_open_archive(folder, name, span))

    return LazyObject(name, span.length, read)


def _open_archive(folder: Folder, name: str, span: Span) -> Archive:
    source = f"{folder.path / span.file}: {show(name)}"
    if span.transforms:
        raise NotAvailableYetError(
            f"{source} is stored through the extensions "
            f"{', '.join(map(show, span.transforms))}, which cannot be read"
        )
    return Archive(folder.file(span.file), span.offset, span.length, source)


@attrs.define(eq=False)
class _PieceReader:
    """Finds out where a piece's elements lie when the first of them are asked for."""

    folder: Folder
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    span: Span
    verify: bool
    where: Strided | None = None

    def copy(self, box: Box, into: torch.Tensor) -> None:
        if self.where is None:
            self.where = self.locate()
        self.where.copy(box, into)

    def locate(self) -> Strided:
        archive = _open_archive(self.folder, self.name, self.span)
        found = archive.read_value()
        if not isinstance(found, SavedTensor):
            raise DamagedCheckpointError(f"{self._source} is damaged: no tensor")
        if (found.dtype, found.shape) != (self.dtype, self.shape):
            raise DamagedCheckpointError(
                f"{self._source} is damaged: expected {self.shape} {self.dtype}, found "
                f"{found.shape} {found.dtype}"
            )
        if self.verify:
            archive.verify(f"data/{found.storage.key}")
        return archive.strided(found)

    @property
    def _source(self) -> str:
        return f"{self.folder.path / self.span.file}: {show(self.name)}"
