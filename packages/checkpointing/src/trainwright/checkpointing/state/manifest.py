"""What a checkpoint says of itself: whose it is, its files, the plain values."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any, NoReturn

import attrs

from trainwright.checkpointing.errors import DamagedCheckpointError
from trainwright.checkpointing.protocol import Files

from .header import parse_json
from .tensor_file import FileRecord
from .tree import decode_plain

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_MAX_BYTES = 2**30
_OUTER = re.compile(rb'\{"crc32":"([0-9a-f]{8})","body":(.*)\}\n', re.DOTALL)
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@attrs.frozen
class Manifest:
    """The contents of ``manifest.json``.

    Args:
        run: Which run saved it.
        step: The step it belongs to.
        sequence: Greater than that of every checkpoint that was in the folder before: the order of
            saving, which neither names nor clocks tell.
        files: One record a rank; None where the rank had nothing to write.
        plain: Plain values by path, as `encode_plain` makes them.
    """

    run: str
    step: int
    sequence: int
    files: tuple[FileRecord | None, ...]
    plain: dict[str, Any]

    def encode(self) -> bytes:
        """Return the bytes of the file: JSON whose body has a checksum before it."""
        records = [None if record is None else list(attrs.astuple(record)) for record in self.files]
        body = json.dumps(
            {
                "format": "trainwright-checkpoint",
                "version": FORMAT_VERSION,
                "run": self.run,
                "step": self.step,
                "sequence": self.sequence,
                "files": records,
                "plain": self.plain,
            },
            separators=(",", ":"),
            allow_nan=False,
        ).encode("ascii")
        return b'{"crc32":"%08x","body":%s}\n' % (zlib.crc32(body), body)

    def decode_plain(self, folder: Path) -> dict[str, Any]:
        """Return the plain values by path; ``folder`` is for messages.

        Raises:
            DamagedCheckpointError: One is not as `encode_plain` makes them.
        """
        try:
            return {path: decode_plain(value) for path, value in self.plain.items()}
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpointError(f"{folder / MANIFEST} is damaged: {error}") from error


def file_name(rank: int) -> str:
    """Return the name of a rank's file; manifests hold no names, so none can leave the folder."""
    return f"rank-{rank:05d}.safetensors"


def is_run_name(run: object) -> bool:
    """Whether ``run`` can name a run: letters, digits, ``_ . -``, at most 64."""
    return isinstance(run, str) and _RUN.fullmatch(run) is not None


def read_manifest(files: Files, folder: Path) -> Manifest:
    """Return the manifest in ``folder``.

    Raises:
        OSError: It cannot be read.
        DamagedCheckpointError: It is not what was written, or of a newer version.
    """
    path = folder / MANIFEST
    reader = files.open(path)
    try:
        size = reader.size
        if size > _MAX_BYTES:
            raise DamagedCheckpointError(f"{path} is damaged: {size} bytes are too many")
        data = bytearray(size)
        if reader.read_into(0, memoryview(data)) != size:
            raise DamagedCheckpointError(f"{path} is damaged: it became shorter while being read")
    finally:
        reader.close()
    return decode_manifest(bytes(data), path)


def decode_manifest(data: bytes, path: Path) -> Manifest:
    """Return the manifest that ``data`` encodes; ``path`` is for messages.

    Raises:
        DamagedCheckpointError: It is not what `Manifest.encode` writes.
    """
    outer = _OUTER.fullmatch(data)
    if outer is None:
        raise DamagedCheckpointError(f"{path} is damaged: {len(data)} bytes that are no manifest")
    found = zlib.crc32(outer[2])
    if found != int(outer[1], 16):
        raise DamagedCheckpointError(
            f"{path} is damaged: expected checksum {outer[1].decode()}, found {found:08x}"
        )
    try:
        return _parse(parse_json(outer[2], path), path)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error!r}") from error


def _parse(body: dict[str, Any], path: Path) -> Manifest:
    if body["format"] != "trainwright-checkpoint":
        _refuse(path, f"the format {body['format']!r}")
    if body["version"] != FORMAT_VERSION:
        raise DamagedCheckpointError(
            f"{path} has format version {body['version']!r}; this package reads version "
            f"{FORMAT_VERSION}: use the package that wrote it, or a newer one"
        )
    for name in ("step", "sequence"):
        if type(body[name]) is not int or body[name] < 0:
            _refuse(path, f"{name} {body[name]!r}")
    if not is_run_name(body["run"]):
        _refuse(path, f"the run {body['run']!r}")
    if not isinstance(body["plain"], dict):
        _refuse(path, "plain values that are not an object")
    records = tuple(_parse_record(record, path) for record in body["files"])
    return Manifest(body["run"], body["step"], body["sequence"], records, body["plain"])


def _parse_record(record: Any, path: Path) -> FileRecord | None:
    if record is None:
        return None
    if len(record) != 3 or not all(type(x) is int and 0 <= x < 2**63 for x in record):
        _refuse(path, f"a file record {record!r}")
    return FileRecord(*record)


def _refuse(path: Path, why: str) -> NoReturn:
    raise DamagedCheckpointError(f"{path} is damaged: it says {why}")
