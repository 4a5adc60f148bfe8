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
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trainwright.checkpointing.errors import DamagedCheckpointError
from trainwright.checkpointing.protocol import Files, Reader, Writer

from .dtypes import dtype_name, file_type, to_bytes
from .header import CHECKSUMS, MAX_HEADER_BYTES, METADATA, TensorInfo, parse_header
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


def write_tensor_file(
    files: Files, path: Path, leaves: Sequence[TensorLeaf], block_bytes: int
) -> FileRecord:
    """Write a new file with the leaves' local tensors and sync it.

    Extra memory: one leaf on the host, where it is not there already or not contiguous.
    """
    header, ordered = plan_header(leaves, block_bytes)
    writer = files.create(path)
    try:
        writer.write(header)
        size = len(header)
        sums: dict[str, bytes] = {}
        for leaf in ordered:
            sums[leaf.path] = _write_blocks(writer, leaf.tensor, block_bytes)
            size += leaf.num_bytes
        table = b"".join(sums[path] for path in sorted(sums))
        writer.write(table)
        writer.sync()
    finally:
        writer.close()
    return FileRecord(size + len(table), zlib.crc32(header), zlib.crc32(table))


def count_blocks(num_bytes: int, block_bytes: int) -> int:
    """Return how many blocks a tensor of so many bytes has."""
    return -(-num_bytes // block_bytes)


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
        self._path = path
        self._reader: Reader = files.open(path)
        try:
            self._open(record)
        except BaseException:
            self.close()
            raise

    def _open(self, record: FileRecord) -> None:
        if self._reader.size != record.size:
            raise _damaged(self._path, "length", record.size, self._reader.size)
        length = int.from_bytes(self._read(0, 8), "little")
        if not 2 <= length <= min(record.size - 8, MAX_HEADER_BYTES):
            raise DamagedCheckpointError(
                f"{self._path} is damaged: {record.size} bytes cannot have a header of {length}"
            )
        header = self._read(0, 8 + length)
        if zlib.crc32(header) != record.header_crc32:
            raise _damaged_sum(self._path, "header", record.header_crc32, zlib.crc32(header))
        self._start = len(header)
        parsed = parse_header(header[8:], record.size - self._start, self._path)
        self._block_bytes = parsed.block_bytes
        self.tensors: dict[str, TensorInfo] = parsed.tensors
        begin, end = parsed.table
        table = self._read(self._start + begin, end - begin)
        if zlib.crc32(table) != record.table_crc32:
            raise _damaged_sum(
                self._path, "table of checksums", record.table_crc32, zlib.crc32(table)
            )
        self._sums = np.frombuffer(table, dtype="<u4")

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
        size = info.dtype.itemsize
        block = np.empty(0, dtype=np.uint8)
        number = -1
        for source, target in runs:
            at, stop = source.start * size, source.stop * size
            write_at = target.start * size
            while at < stop:
                if at // self._block_bytes != number:
                    number = at // self._block_bytes
                    block = np.frombuffer(self._read_block(info, number), dtype=np.uint8)
                first = at - number * self._block_bytes
                count = min(stop - at, len(block) - first)
                into[write_at : write_at + count] = block[first : first + count]
                at += count
                write_at += count

    def verify(self) -> None:
        """Read every block and compare its checksum.

        Raises:
            DamagedCheckpointError: A block is not what was written.
        """
        for info in self.tensors.values():
            for number in range(count_blocks(info.end - info.begin, self._block_bytes)):
                self._read_block(info, number)

    def close(self) -> None:
        """Release the file."""
        self._reader.close()

    def _read_block(self, info: TensorInfo, number: int) -> bytearray:
        begin = info.begin + number * self._block_bytes
        end = min(begin + self._block_bytes, info.end)
        block = self._read(self._start + begin, end - begin)
        found = zlib.crc32(block)
        expected = int(self._sums[info.first_block + number])
        if found != expected:
            what = f"tensor {info.name!r}, bytes {begin} to {end} of the data"
            raise _damaged_sum(self._path, what, expected, found)
        return block

    def _read(self, offset: int, count: int) -> bytearray:
        buffer = bytearray(count)
        done = self._reader.read_into(offset, memoryview(buffer))
        if done != count:
            raise _damaged(self._path, f"bytes at {offset}", count, done)
        return buffer


def _write_blocks(writer: Writer, tensor: torch.Tensor, block_bytes: int) -> bytes:
    """Write a tensor's bytes and return the checksums of its blocks."""
    data = to_bytes(tensor)
    sums = bytearray()
    for begin in range(0, len(data), block_bytes):
        block = data[begin : begin + block_bytes]
        writer.write(block)
        sums += zlib.crc32(block).to_bytes(4, "little")
    return bytes(sums)


def _damaged(path: Path, what: str, expected: int, found: int) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{path} is damaged: {what}: expected {expected}, found {found}")


def _damaged_sum(path: Path, what: str, expected: int, found: int) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path} is damaged: {what}: expected checksum {expected:08x}, found {found:08x}"
    )
