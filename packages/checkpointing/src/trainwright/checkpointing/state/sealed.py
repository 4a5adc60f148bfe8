"""Small files of JSON that are read and written whole and have a checksum of themselves."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

from trainwright.checkpointing.errors import DamagedCheckpointError
from trainwright.checkpointing.protocol import Files

from .header import parse_json

_MAX_BYTES = 2**30
_OUTER = re.compile(rb'\{"crc32":"([0-9a-f]{8})","body":(.*)\}\n', re.DOTALL)


def seal(body: dict[str, Any]) -> tuple[bytes, int]:
    """Return a file of JSON that has the checksum of its body before it, and the checksum."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
    crc32 = zlib.crc32(text)
    return b'{"crc32":"%08x","body":%s}\n' % (crc32, text), crc32


def unseal(data: bytes, path: Path) -> tuple[Any, int]:
    """Return the body in a file that `seal` made, and its checksum; ``path`` is for messages.

    Raises:
        DamagedCheckpointError: It is not what was written.
    """
    outer = _OUTER.fullmatch(data)
    if outer is None:
        raise DamagedCheckpointError(
            f"{path} is damaged: {len(data)} bytes that are no JSON with a checksum"
        )
    found = zlib.crc32(outer[2])
    if found != int(outer[1], 16):
        raise DamagedCheckpointError(
            f"{path} is damaged: expected checksum {outer[1].decode()}, found {found:08x}"
        )
    return parse_json(outer[2], path), found


def read_whole(files: Files, path: Path, size: int | None = None) -> bytes:
    """Return the contents of a file of JSON, of ``size`` bytes if that is known.

    Raises:
        OSError: It cannot be read.
        DamagedCheckpointError: Its length is not what was written.
    """
    reader = files.open(path)
    try:
        found = reader.size
        if size is not None and found != size:
            raise DamagedCheckpointError(
                f"{path} is damaged: length: expected {size}, found {found}"
            )
        if found > _MAX_BYTES:
            raise DamagedCheckpointError(f"{path} is damaged: {found} bytes are too many")
        data = bytearray(found)
        if reader.read_into(0, memoryview(data)) != found:
            raise DamagedCheckpointError(f"{path} is damaged: it became shorter while being read")
    finally:
        reader.close()
    return bytes(data)


def write_whole(files: Files, path: Path, data: bytes) -> None:
    """Write a new file and sync it.

    Raises:
        OSError: It cannot be written.
    """
    writer = files.create(path)
    try:
        writer.write(data)
        writer.sync()
    finally:
        writer.close()
