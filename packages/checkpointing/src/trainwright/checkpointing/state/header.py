"""Reads the header of a tensor file without believing it."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any, NoReturn

import attrs
import torch

from trainwright.checkpointing.errors import DamagedCheckpointError
from trainwright.checkpointing.protocol import Reader
from trainwright.collectives.shard_spec import ShardSpec

from .dtypes import file_type, parse_dtype

METADATA = "__metadata__"
CHECKSUMS = "__crc32__"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_MAX_BOXES = 1024  # a fused weight has three; checking n boxes costs n * n
_MAX_SIZE = 2**62


@attrs.frozen
class TensorInfo:
    """Where a tensor is in a file and which part of which global tensor it is.

    ``begin`` and ``end`` count bytes from the beginning of the data, ``first_block`` the blocks of
    the tensors before it.
    """

    name: str
    dtype: torch.dtype
    spec: ShardSpec
    begin: int
    end: int
    first_block: int


@attrs.frozen
class Header:
    """What a header says: tensors by name, bytes a block, and where the checksums are."""

    tensors: dict[str, TensorInfo]
    block_bytes: int
    table: tuple[int, int]


def parse_json(text: bytes | bytearray | str, source: Path) -> Any:
    """Return the JSON value in ``text``; an object that names a key twice is refused.

    So are numbers that are not finite, which Python reads and JSON does not have.

    Raises:
        DamagedCheckpointError: It is not JSON that Python can hold.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_refuse_twins,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except (ValueError, RecursionError) as error:  # ValueError: syntax, encoding, huge integers
        raise DamagedCheckpointError(f"{source} is damaged: {error}") from error


def read_header(reader: Reader, source: Path, size: int, crc32: int) -> tuple[int, Header]:
    """Return where the data of an open file begins, and its header.

    Args:
        reader: The file.
        source: Its path, for messages.
        size: The length that it should have.
        crc32: The checksum that its length field and JSON should have.

    Raises:
        OSError: It cannot be read.
        DamagedCheckpointError: It is not what was written.
    """
    if reader.size != size:
        raise DamagedCheckpointError(
            f"{source} is damaged: length: expected {size}, found {reader.size}"
        )
    first = bytearray(8)
    read = reader.read_into(0, memoryview(first))
    length = int.from_bytes(first, "little")
    if read != 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise DamagedCheckpointError(
            f"{source} is damaged: {size} bytes cannot have a header of {length}"
        )
    text = bytearray(length)
    read = reader.read_into(8, memoryview(text))
    found = zlib.crc32(text, zlib.crc32(first))
    if read != length or found != crc32:
        raise DamagedCheckpointError(
            f"{source} is damaged: header: expected checksum {crc32:08x}, found {found:08x}"
        )
    return 8 + length, parse_header(text, size - 8 - length, source)


def parse_header(text: bytes | bytearray, data_bytes: int, source: Path) -> Header:
    """Return what the header says, every number of it checked against the file's length.

    Args:
        text: The JSON.
        data_bytes: Bytes that follow it in the file.
        source: The file, for messages.

    Raises:
        DamagedCheckpointError: It is not a header that this package writes.
    """
    try:
        return _Parser(source, data_bytes).parse(parse_json(text, source))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise DamagedCheckpointError(
            f"{source} is damaged: its header is not one of ours: {error!r}"
        ) from error


@attrs.frozen
class _Parser:
    source: Path
    data_bytes: int

    def parse(self, value: dict[str, Any]) -> Header:
        ours = parse_json(value[METADATA]["trainwright"], self.source)
        block_bytes = ours["block_bytes"]
        if type(block_bytes) is not int or block_bytes < 16 or block_bytes % 16:
            self._refuse(f"blocks of {block_bytes!r} bytes")
        entries = {name: entry for name, entry in value.items() if name != METADATA}
        specs = ours["tensors"]
        if set(specs) != set(entries) - {CHECKSUMS} or CHECKSUMS not in entries:
            self._refuse("specs and tensors have different names")
        self._check_filled(entries)
        tensors: dict[str, TensorInfo] = {}
        num_blocks = 0
        for name in sorted(specs):
            tensors[name] = self._tensor(name, entries[name], specs[name], num_blocks)
            num_blocks += -(-(tensors[name].end - tensors[name].begin) // block_bytes)
        begin, end = self._offsets(entries[CHECKSUMS])
        if end - begin != 4 * num_blocks:
            self._refuse(f"{end - begin} bytes of checksums for {num_blocks} blocks")
        return Header(tensors, block_bytes, (begin, end))

    def _check_filled(self, entries: dict[str, Any]) -> None:
        """Raise unless the tensors fill the data without gaps and without sharing bytes."""
        at = 0
        for begin, end in sorted(self._offsets(entry) for entry in entries.values()):
            if begin != at:
                self._refuse(f"a tensor begins at {begin}, expected {at}")
            at = end
        if at != self.data_bytes:
            self._refuse(f"tensors fill {at} of {self.data_bytes} bytes of data")

    def _offsets(self, entry: dict[str, Any]) -> tuple[int, int]:
        begin, end = entry["data_offsets"]
        if type(begin) is not int or type(end) is not int:
            self._refuse(f"offsets {begin!r}, {end!r}")
        if not 0 <= begin <= end <= self.data_bytes:
            self._refuse(f"offsets {begin}, {end} in {self.data_bytes} bytes of data")
        return begin, end

    def _tensor(
        self, name: str, entry: dict[str, Any], described: dict[str, Any], first_block: int
    ) -> TensorInfo:
        dtype = parse_dtype(described["dtype"])
        if dtype is None:
            self._refuse(f"{name!r} has the unknown dtype {described['dtype']!r}")
        spec = self._spec(name, described["spec"])
        kind, shape = file_type(dtype, spec.local_shape)
        if entry["dtype"] != kind or entry["shape"] != list(shape):
            self._refuse(f"{name!r} has a spec of another dtype or shape")
        begin, end = self._offsets(entry)
        if end - begin != spec.numel * dtype.itemsize:
            self._refuse(f"{name!r} has {end - begin} bytes for {spec.numel} elements of {dtype}")
        return TensorInfo(name, dtype, spec, begin, end, first_block)

    def _spec(self, name: str, described: dict[str, Any]) -> ShardSpec:
        shape = described["global_shape"]
        boxes = described["boxes"]
        if len(boxes) > _MAX_BOXES or len(shape) > 64:
            self._refuse(f"{name!r} has {len(boxes)} boxes in {len(shape)} dims")
        if math.prod(max(size, 1) for size in shape) > _MAX_SIZE:
            self._refuse(f"{name!r} has the shape {shape}")
        return ShardSpec.from_json(described)

    def _refuse(self, why: str) -> NoReturn:
        raise DamagedCheckpointError(f"{self.source} is damaged: its header says {why}")


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object names a key twice")
    return result


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text:.20} is not finite")
    return number
