"""What a checkpoint says of itself: whose it is, its files, the plain values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import attrs

from trainwright.checkpointing.errors import DamagedCheckpointError
from trainwright.checkpointing.protocol import Files

from .sealed import read_whole, seal, unseal
from .tensor_file import FileRecord
from .tree import decode_plain

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
_MAX_FILES = 2**24
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@attrs.frozen
class IndexRecord:
    """What the manifest says of one index file: its length and the checksum of its body."""

    size: int
    crc32: int


@attrs.frozen
class Manifest:
    """The contents of ``manifest.json``, written in format 2.

    Args:
        run: Which run saved it.
        step: The step it belongs to.
        sequence: Greater than that of every checkpoint that was in the folder before: the order of
            saving, which neither names nor clocks tell.
        plain: Plain values by path, as `encode_plain` makes them.
        num_files: How many ranks saved; each wrote one file of tensors or none.
        index: One record for each index file.
        files: None; what was read of format 1, which has no index: one record a rank, or None where
            the rank had nothing to write.
    """

    run: str
    step: int
    sequence: int
    plain: dict[str, Any]
    num_files: int
    index: tuple[IndexRecord, ...]
    files: tuple[FileRecord | None, ...] | None = None

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return seal(
            {
                "format": "trainwright-checkpoint",
                "version": FORMAT_VERSION,
                "run": self.run,
                "step": self.step,
                "sequence": self.sequence,
                "num_files": self.num_files,
                "index": [[record.size, record.crc32] for record in self.index],
                "plain": self.plain,
            }
        )[0]

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


def index_name(number: int) -> str:
    """Return the name of an index file."""
    return f"index-{number:05d}.json"


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
    return decode_manifest(read_whole(files, path), path)


def decode_manifest(data: bytes, path: Path) -> Manifest:
    """Return the manifest that ``data`` encodes; ``path`` is for messages.

    Raises:
        DamagedCheckpointError: It is not what `Manifest.encode` writes or wrote in format 1.
    """
    body, _ = unseal(data, path)
    try:
        return _parse(body, path)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error!r}") from error


def _parse(body: dict[str, Any], path: Path) -> Manifest:
    if body["format"] != "trainwright-checkpoint":
        _refuse(path, f"the format {body['format']!r}")
    if body["version"] not in (1, FORMAT_VERSION):
        raise DamagedCheckpointError(
            f"{path} has format version {body['version']!r}; this package reads versions 1 to "
            f"{FORMAT_VERSION}: use the package that wrote it, or a newer one"
        )
    for name in ("step", "sequence"):
        if type(body[name]) is not int or body[name] < 0:
            _refuse(path, f"{name} {body[name]!r}")
    if not is_run_name(body["run"]):
        _refuse(path, f"the run {body['run']!r}")
    if not isinstance(body["plain"], dict):
        _refuse(path, "plain values that are not an object")
    of_all = (body["run"], body["step"], body["sequence"], body["plain"])
    if body["version"] == 1:
        files = tuple(_parse_file(record, path) for record in body["files"])
        return Manifest(*of_all, len(files), (), files)
    index = tuple(IndexRecord(*_parse_record(record, 2, path)) for record in body["index"])
    (num_files,) = _parse_record([body["num_files"]], 1, path)
    if not 1 <= len(index) <= num_files <= _MAX_FILES:
        _refuse(path, f"{len(index)} index files for {num_files} ranks")
    return Manifest(*of_all, num_files, index)


def _parse_file(record: Any, path: Path) -> FileRecord | None:
    return None if record is None else FileRecord(*_parse_record(record, 3, path))


def _parse_record(record: Any, length: int, path: Path) -> list[int]:
    if type(record) is not list or len(record) != length:
        _refuse(path, f"a record {record!r}")
    if not all(type(x) is int and 0 <= x < 2**63 for x in record):
        _refuse(path, f"a record {record!r}")
    return record


def _refuse(path: Path, why: str) -> NoReturn:
    raise DamagedCheckpointError(f"{path} is damaged: it says {why}")
