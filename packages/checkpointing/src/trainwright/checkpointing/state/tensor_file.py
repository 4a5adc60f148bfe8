"""One rank's tensors in one file: the safetensors format, with a checksum for each block.

    8 bytes       length n of the header, little-endian
    n bytes       JSON: name -> dtype, shape, data_offsets; __metadata__ -> our specs
    data          the tensors, largest elements first, and one more:
    __crc32__     4 bytes for each block of each tensor, tensors in the order of their names

A block is ``block_bytes`` of one tensor (its last one may be shorter), so a part of a tensor can be
verified without reading the rest. The checksums of header and table are in the manifest.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from trainwright.checkpointing.errors import DamagedCheckpointError
from trainwright.checkpointing.protocol import Files

from .dtypes import dtype_name, file_type, to_bytes
from .header import CHECKSUMS, METADATA, TensorInfo, read_header
from .index import DataFile, Piece
from .piece_file import PieceFile, count_blocks
from .tree import TensorLeaf


@attrs.frozen
class FileRecord:
    """What the manifest says of one file: its length and the checksums of header and table."""

    size: int
    header_crc32: int
    table_crc32: int


def plan_header(leaves: Iterable[TensorLeaf], block_bytes: int) -> tuple[bytes, list[TensorLeaf]]:
    """Return the first bytes of a file with these leaves, and the leaves in the file's order."""
    ordered = sorted(leaves, key=lambda leaf: -leaf.tensor.dtype.itemsize)
    tensors: dict[str, Any] = {}
    specs: dict[str, Any] = {}
    end = 0
    num_blocks = 0
    for leaf in ordered:
        begin, end = end, end + leaf.num_bytes
        num_blocks += count_blocks(leaf.num_bytes, block_bytes)
        kind, shape = file_type(leaf.tensor.dtype, leaf.spec.local_shape)
        tensors[leaf.path] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        specs[leaf.path] = {
            "dtype": dtype_name(leaf.tensor.dtype),
            "spec": leaf.spec.to_json(),
        }
    size = 4 * num_blocks
    tensors[CHECKSUMS] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
    ours = json.dumps({"block_bytes": block_bytes, "tensors": specs}, separators=(",", ":"))
    metadata = {"format": "pt", "trainwright": ours}
    text = json.dumps({METADATA: metadata, **tensors}, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # so that the data is aligned where the file is mapped
    return len(text).to_bytes(8, "little") + text, ordered


@attrs.frozen(eq=False)
class PlacedLeaf:
    """A leaf and where a file has it: positions are those of `Piece`."""

    leaf: TensorLeaf
    offset: int
    sums: int


@attrs.frozen(eq=False)
class FilePlan:
    """All that is known of a file before it is written.

    Args:
        header: Its first bytes.
        leaves: The leaves in the order of the file.
        size: Its length in bytes.
        block_bytes: Bytes of a leaf under one checksum.
    """

    header: bytes
    leaves: tuple[PlacedLeaf, ...]
    size: int
    block_bytes: int


def plan_file(leaves: Iterable[TensorLeaf], block_bytes: int) -> FilePlan:
    """Return what a file with these leaves will be, and where each of them will stand in it."""
    header, ordered = plan_header(leaves, block_bytes)
    ends = accumulate((leaf.num_bytes for leaf in ordered), initial=len(header))
    offsets = {leaf.path: offset for leaf, offset in zip(ordered, ends, strict=False)}
    size = len(header) + sum(leaf.num_bytes for leaf in ordered)
    sums: dict[str, int] = {}
    for leaf in sorted(ordered, key=lambda leaf: leaf.path):
        sums[leaf.path] = size
        size += 4 * count_blocks(leaf.num_bytes, block_bytes)
    placed = (PlacedLeaf(leaf, offsets[leaf.path], sums[leaf.path]) for leaf in ordered)
    return FilePlan(header, tuple(placed), size, block_bytes)


def write_planned_file(files: Files, path: Path, plan: FilePlan) -> FileRecord:
    """Write a new file with the leaves' local tensors and sync it.

    Extra memory: one leaf on the host, where it is not there already or not contiguous.
    """
    table = bytearray(4 * sum(_num_blocks(placed, plan) for placed in plan.leaves))
    start = plan.size - len(table)
    writer = files.create(path)
    try:
        writer.write(plan.header)
        for placed in plan.leaves:
            data = to_bytes(placed.leaf.tensor)
            at = placed.sums - start
            for begin in range(0, len(data), plan.block_bytes):
                block = data[begin : begin + plan.block_bytes]
                table[at : at + 4] = zlib.crc32(block).to_bytes(4, "little")
                writer.write(block)  # while the caches hold it
                at += 4
        writer.write(bytes(table))
        writer.sync()
    finally:
        writer.close()
    return FileRecord(plan.size, zlib.crc32(plan.header), zlib.crc32(table))


def write_tensor_file(
    files: Files, path: Path, leaves: Sequence[TensorLeaf], block_bytes: int
) -> FileRecord:
    """Plan a file with these leaves and write it."""
    return write_planned_file(files, path, plan_file(leaves, block_bytes))


class TensorFile:
    """A file open for reading; nothing in it is believed before its checksum has been compared.

    Args:
        files: Where it is.
        path: Its path.
        record: What the manifest says of it.

    Raises:
        DamagedCheckpointError: Length, header or table of checksums are not what was written.
    """

    def __init__(self, files: Files, path: Path, record: FileRecord) -> None:
        reader = files.open(path)
        try:
            self._start, header = read_header(reader, path, record.size, record.header_crc32)
            begin, end = header.table
            self._table = self._start + begin
            found = zlib.crc32(reader.view(self._table, end - begin))
            if found != record.table_crc32:
                raise DamagedCheckpointError(
                    f"{path} is damaged: table of checksums: expected checksum "
                    f"{record.table_crc32:08x}, found {found:08x}"
                )
        except BaseException:
            reader.close()
            raise
        self.tensors: dict[str, TensorInfo] = header.tensors
        self._file = DataFile(0, record.size, header.block_bytes)
        self._pieces = PieceFile(reader, path, self._file)

    def read(
        self, name: str, runs: Sequence[tuple[slice, slice]], into: npt.NDArray[np.uint8]
    ) -> None:
        """Copy runs of a tensor's elements; only the blocks that hold them are read and verified.

        Args:
            name: A name in `tensors`.
            runs: (elements of the stored tensor, elements of ``into``), sorted by the first.
            into: The target's memory as bytes.

        Raises:
            DamagedCheckpointError: A block is not what was written.
        """
        info = self.tensors[name]
        self._pieces.read(self._piece(info), info.dtype, runs, into)

    def verify(self) -> None:
        """Read every block and compare its checksum.

        Raises:
            DamagedCheckpointError: A block is not what was written.
        """
        for info in self.tensors.values():
            self._pieces.verify(self._piece(info), info.dtype)

    def close(self) -> None:
        """Release the file."""
        self._pieces.close()

    def _piece(self, info: TensorInfo) -> Piece:
        sums = self._table + 4 * info.first_block
        return Piece(self._file, info.spec, self._start + info.begin, sums)


def _num_blocks(placed: PlacedLeaf, plan: FilePlan) -> int:
    return count_blocks(placed.leaf.num_bytes, plan.block_bytes)
