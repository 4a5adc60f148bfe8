"""Reads pieces of tensors whose places are known, without the header of the file."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from trainwright.checkpointing.errors import DamagedCheckpointError
from trainwright.checkpointing.protocol import Files, Reader

from .index import DataFile, Piece

Runs = Iterable[tuple[slice, slice]]


class PieceFile:
    """A file of tensors open for reading; it is a context manager that closes it.

    Blocks are looked at where the file is mapped, and no element is copied before the checksum of
    its block has been compared.

    Args:
        reader: The open file; closed with this.
        path: Its path, for messages.
        file: What is known of it.
    """

    def __init__(self, reader: Reader, path: Path, file: DataFile) -> None:
        self._reader = reader
        self._path = path
        self._file = file

    @classmethod
    def open(cls, files: Files, path: Path, file: DataFile) -> PieceFile:
        """Open a file; nothing of it is read.

        Raises:
            OSError: It cannot be opened.
            DamagedCheckpointError: It has another length.
        """
        opened = cls(files.open(path), path, file)
        found = opened._reader.size
        if found != file.size:
            opened.close()
            raise DamagedCheckpointError(
                f"{path} is damaged: length: expected {file.size}, found {found}"
            )
        return opened

    def __enter__(self) -> PieceFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def read(
        self, piece: Piece, dtype: torch.dtype, runs: Runs, into: npt.NDArray[np.uint8]
    ) -> None:
        """Copy runs of a piece's elements; only the blocks that hold them are read and verified.

        Args:
            piece: A piece in this file.
            dtype: Of its elements.
            runs: (elements of the piece, elements of ``into``), sorted by the first.
            into: The target's memory as bytes.

        Raises:
            OSError: The file cannot be read.
            DamagedCheckpointError: A block or its checksum is not what was written; no element of
                that block has been copied.
        """
        runs = [run for run in runs if run[0].stop > run[0].start]
        if not runs:
            return
        size, block_bytes = dtype.itemsize, self._file.block_bytes
        first = runs[0][0].start * size // block_bytes
        sums = self._sums(piece, first, -(-runs[-1][0].stop * size // block_bytes))
        number = -1
        block = np.empty(0, dtype=np.uint8)
        for source, target in runs:
            at, stop, write_at = source.start * size, source.stop * size, target.start * size
            while at < stop:
                if at // block_bytes != number:
                    number = at // block_bytes
                    block = self._block(piece, dtype, number, int(sums[number - first]))
                begin = at - number * block_bytes
                count = min(stop - at, len(block) - begin)
                into[write_at : write_at + count] = block[begin : begin + count]
                at += count
                write_at += count

    def verify(self, piece: Piece, dtype: torch.dtype) -> None:
        """Read every block of a piece and compare its checksum.

        Raises:
            OSError: The file cannot be read.
            DamagedCheckpointError: A block or its checksum is not what was written.
        """
        num_blocks = count_blocks(piece.spec.numel * dtype.itemsize, self._file.block_bytes)
        sums = self._sums(piece, 0, num_blocks)
        for number in range(num_blocks):
            self._block(piece, dtype, number, int(sums[number]))

    def close(self) -> None:
        """Release the file."""
        self._reader.close()

    def _sums(self, piece: Piece, first: int, stop: int) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self._view(piece.sums + 4 * first, 4 * (stop - first)), dtype="<u4")

    def _block(
        self, piece: Piece, dtype: torch.dtype, number: int, expected: int
    ) -> npt.NDArray[np.uint8]:
        begin = number * self._file.block_bytes
        end = min(begin + self._file.block_bytes, piece.spec.numel * dtype.itemsize)
        block = self._view(piece.offset + begin, end - begin)
        found = zlib.crc32(block)
        if found != expected:
            raise DamagedCheckpointError(
                f"{self._path} is damaged: tensor {piece.spec.name!r}, bytes {begin} to {end} of "
                f"its part in this file: expected checksum {expected:08x}, found {found:08x}"
            )
        return np.frombuffer(block, dtype=np.uint8)

    def _view(self, offset: int, count: int) -> memoryview:
        view = self._reader.view(offset, count)
        if len(view) != count:
            raise DamagedCheckpointError(
                f"{self._path} is damaged: bytes at {offset}: expected {count}, found {len(view)}"
            )
        return view


def count_blocks(num_bytes: int, block_bytes: int) -> int:
    """Return how many blocks a tensor of so many bytes has."""
    return -(-num_bytes // block_bytes)
