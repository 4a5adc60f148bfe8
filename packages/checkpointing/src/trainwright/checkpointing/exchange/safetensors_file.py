"""The safetensors format: a length, a header in JSON, and the tensors' bytes.

    8 bytes       length n of the header, little-endian
    n bytes       JSON: name -> dtype, shape, data_offsets; __metadata__ -> strings
    data          the tensors, one after the other, without gaps

Source: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import attrs
import torch

from trainwright.checkpointing.errors import DamagedCheckpointError, NotAvailableYetError, TreeError
from trainwright.checkpointing.state.dtypes import file_type
from trainwright.checkpointing.state.header import parse_json

from .readers import Bytes, read_exactly
from .showing import show
from .strided import Strided

METADATA = "__metadata__"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_MAX_DIMS = 64


@attrs.frozen
class StoredTensor:
    """A tensor of one file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    where: Strided


@attrs.frozen
class SafetensorsFile:
    """What a file's header says, every number of it checked against the file's length."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def standard_dtypes() -> dict[str, torch.dtype]:
    """Return the dtypes that the format has names for, by those names."""
    found: dict[str, torch.dtype] = {}
    for value in vars(torch).values():
        if isinstance(value, torch.dtype):
            name, shape = file_type(value, ())
            if shape == ():
                found[name] = value
    return found


def read_safetensors_file(reader: Bytes, path: Path) -> SafetensorsFile:
    """Return what the header of a file says; no data is read.

    Raises:
        DamagedCheckpointError: It is not a file of this format.
        NotAvailableYetError: A tensor has a dtype that PyTorch or this package does not know.
    """
    size = reader.size
    if size < 8:
        raise DamagedCheckpointError(f"{path} is damaged: {size} bytes have no header")
    length = int.from_bytes(read_exactly(reader, 0, 8, path), "little")
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise DamagedCheckpointError(
            f"{path} is damaged: {size} bytes cannot have a header of {length}"
        )
    value = parse_json(read_exactly(reader, 8, length, path), path)
    try:
        return _Header(reader, path, 8 + length).parse(value)
    except (
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DamagedCheckpointError(f"{path} is damaged: its header: {error!r:.200}") from error


@attrs.frozen
class _Header:
    reader: Bytes
    path: Path
    start: int

    def parse(self, value: Any) -> SafetensorsFile:
        if not isinstance(value, dict):
            self.refuse("no object")
        metadata = value.pop(METADATA, {})
        if not isinstance(metadata, dict) or not all(
            isinstance(text, str) for text in metadata.values()
        ):
            self.refuse(f"{METADATA} of other things than strings")
        known = standard_dtypes()
        tensors = {name: self.tensor(name, entry, known) for name, entry in value.items()}
        at = self.start
        for stored in sorted(tensors.values(), key=lambda t: (t.where.begin, _num_bytes(t))):
            if stored.where.begin != at:
                self.refuse(f"a tensor at {stored.where.begin - self.start}, expected at "
                            f"{at - self.start}")  # fmt: skip
            at += _num_bytes(stored)
        if at != self.reader.size:
            self.refuse(f"{at} bytes of {self.reader.size}")
        return SafetensorsFile(tensors, metadata)

    def tensor(self, name: str, entry: Any, known: Mapping[str, torch.dtype]) -> StoredTensor:
        if set(entry) != {"dtype", "shape", "data_offsets"}:
            self.refuse(f"of {show(name)} {len(entry)} fields")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if len(offsets) != 2 or len(shape) > _MAX_DIMS or not all(
            type(n) is int and 0 <= n < 2**62 for n in (*shape, *offsets)
        ):  # fmt: skip
            self.refuse(f"{show(name)} has shape {show(shape)}, offsets {show(offsets)}")
        if math.prod(max(n, 1) for n in shape) > 2**62:  # also of a shape with a 0 in it
            self.refuse(f"{show(name)} has too many elements")
        dtype = known.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None:
            raise NotAvailableYetError(
                f"{self.path}: {show(name)} has the dtype {show(entry['dtype'])}, which cannot "
                f"be read; those that can: {', '.join(sorted(known))}"
            )
        begin, end = offsets
        if end - begin != math.prod(shape) * dtype.itemsize:
            self.refuse(f"{show(name)} has {end - begin} bytes for shape {shape} of {dtype}")
        if self.start + end > self.reader.size:
            self.refuse(f"{show(name)} ends at {end}, beyond the file")
        sizes = tuple(shape)
        where = Strided.packed(
            self.reader, self.start + begin, dtype, sizes, f"{self.path}: {show(name)}"
        )
        return StoredTensor(dtype, sizes, where)

    def refuse(self, why: str) -> NoReturn:
        raise DamagedCheckpointError(f"{self.path} is damaged: its header says {why}")


def plan_safetensors_file(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[str]]:
    """Return the first bytes of a file with these tensors, and the order of their data.

    Raises:
        TreeError: The format has no name for a dtype.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    entries: dict[str, Any] = {}
    end = 0
    for name in order:
        dtype, shape = tensors[name]
        kind, stored = file_type(dtype, shape)
        if stored != shape or name == METADATA:
            raise TreeError(f"{name}: the safetensors format has no such name, or no {dtype}")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps({METADATA: dict(metadata), **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned where the file is mapped
    if len(text) > MAX_HEADER_BYTES:
        raise TreeError(f"a header of {len(text)} bytes is longer than the format allows")
    return len(text).to_bytes(8, "little") + text, order


def _num_bytes(stored: StoredTensor) -> int:
    return math.prod(stored.shape) * stored.dtype.itemsize
