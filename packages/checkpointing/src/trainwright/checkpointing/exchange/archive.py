"""What `torch.save` writes, read as data: a zip archive of a pickle and the bytes of storages."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import attrs

from trainwright.checkpointing.errors import DamagedCheckpointError, NotAvailableYetError

from .pickles import read_pickle
from .readers import Bytes, read_exactly
from .saved_tensor import ADMITTED, SavedTensor, find_storage
from .showing import show
from .strided import Strided

_LOCAL_HEADER = 30
_MAX_DIRECTORY_BYTES = 1 << 26
_MAX_PICKLE_BYTES = 1 << 28
_BLOCK_BYTES = 1 << 20
_BROKEN = (
    zipfile.BadZipFile,
    ValueError,
    NotImplementedError,
    EOFError,
    struct.error,
    OverflowError,
    IndexError,
)


@attrs.frozen
class Entry:
    """Where a record of the archive lies in its file; ``crc32`` is 0 where none was stored."""

    begin: int
    size: int
    crc32: int


class Archive:
    """One archive in a file, from ``begin`` on.

    Args:
        reader: The file.
        begin: Where the archive begins.
        length: Its bytes.
        source: What it is, for messages.

    Raises:
        DamagedCheckpointError: It is no archive, or its records are compressed or share bytes.
    """

    def __init__(self, reader: Bytes, begin: int, length: int, source: Path | str) -> None:
        self._reader = reader
        self.source = source
        self.length = length
        try:
            with zipfile.ZipFile(_Window(reader, begin, length, source)) as archive:
                infos = archive.infolist()
        except _BROKEN as error:
            raise self._damaged(repr(error)) from error
        self.entries: dict[str, Entry] = {}
        for info in infos:
            name = info.filename.partition("/")[2]
            if name in self.entries:
                raise self._damaged(f"two records {show(name)}")
            self.entries[name] = self._locate(info, begin, length)
        end = begin
        for entry in sorted(self.entries.values(), key=lambda entry: entry.begin):
            if entry.begin < end:
                raise self._damaged("two records share bytes")
            end = entry.begin + entry.size

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return a whole record, after its checksum has been compared.

        Raises:
            DamagedCheckpointError: It is not there, too long, or not what was written.
        """
        entry = self._entry(name)
        if entry.size > max_bytes:
            raise self._damaged(f"{entry.size} bytes of {show(name)}")
        data = bytes(read_exactly(self._reader, entry.begin, entry.size, self.source))
        self._compare(name, entry, zlib.crc32(data))
        return data

    def verify(self, name: str) -> None:
        """Read a record block by block and compare its checksum.

        Raises:
            DamagedCheckpointError: It is not what was written.
        """
        entry = self._entry(name)
        found = 0
        for at in range(0, entry.size, _BLOCK_BYTES):
            count = min(_BLOCK_BYTES, entry.size - at)
            found = zlib.crc32(
                read_exactly(self._reader, entry.begin + at, count, self.source), found
            )
        self._compare(name, entry, found)

    def read_value(self) -> Any:
        """Return the value that was saved; tensors in it are `SavedTensor`.

        Raises:
            UntrustedError: It is not made of plain values and tensors.
            DamagedCheckpointError: The archive is not what was written.
        """
        if "byteorder" in self.entries and self.read("byteorder", 16) != b"little":
            raise NotAvailableYetError(f"{self.source} was written by a big-endian processor")
        data = self.read("data.pkl", _MAX_PICKLE_BYTES)
        return read_pickle(data, ADMITTED, self.source, find_storage)

    def strided(self, tensor: SavedTensor) -> Strided:
        """Return where the elements of a tensor lie in the file.

        Raises:
            DamagedCheckpointError: The storage has not all of them.
        """
        entry = self._entry(f"data/{tensor.storage.key}")
        size = tensor.dtype.itemsize
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))
        needed = 0 if 0 in tensor.shape else (tensor.offset + last + 1) * size
        held = math.prod(tensor.shape) * size
        if entry.size != tensor.storage.num_bytes or max(needed, held) > entry.size:
            raise self._damaged(
                f"a storage of {entry.size} bytes for a tensor of {tensor.shape} {tensor.dtype}"
            )
        return Strided(
            self._reader,
            entry.begin + tensor.offset * size,
            tensor.dtype,
            tensor.shape,
            tensor.stride,
            str(self.source),
            tensor.is_conj,
            tensor.is_neg,
        )

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise self._damaged(f"it has no record {show(name)}")
        return self.entries[name]

    def _locate(self, info: zipfile.ZipInfo, begin: int, length: int) -> Entry:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise self._damaged("compressed records, which torch.save never writes")
        at = info.header_offset
        if not 0 <= at <= length - _LOCAL_HEADER:
            raise self._damaged(f"a record at {at} of {length} bytes")
        header = read_exactly(self._reader, begin + at, _LOCAL_HEADER, self.source)
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        data = at + _LOCAL_HEADER + names
        if header[:4] != b"PK\3\4" or data + info.file_size > length:
            raise self._damaged(f"a record of {info.file_size} bytes at {at} of {length}")
        return Entry(begin + data, info.file_size, info.CRC)

    def _compare(self, name: str, entry: Entry, found: int) -> None:
        # Where torch was told to compute no checksums it writes zeros.
        if entry.crc32 not in (0, found):
            raise self._damaged(
                f"record {show(name)}: expected checksum {entry.crc32:08x}, found {found:08x}"
            )

    def _damaged(self, why: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self.source} is damaged: {why}")


class _Window(io.RawIOBase):
    """A part of a file as a file of its own, for `zipfile`."""

    def __init__(self, reader: Bytes, begin: int, length: int, source: Path | str) -> None:
        self._reader, self._begin, self._length = reader, begin, length
        self._source = source
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._length)[whence]
        if at < 0:
            raise ValueError(f"position {at}")
        self._at = at
        return at

    def read(self, count: int = -1, /) -> bytes:
        left = max(self._length - self._at, 0)
        count = left if count < 0 else min(count, left)
        if count > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {count} bytes")
        data = read_exactly(self._reader, self._begin + self._at, count, self._source)
        self._at += count
        return bytes(data)
