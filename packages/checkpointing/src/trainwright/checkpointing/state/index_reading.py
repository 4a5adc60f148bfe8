"""Finds where tensors lie, each rank asking for what it wants and no rank seeing all names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from trainwright.checkpointing.errors import DamagedCheckpointError, LoadFailedError
from trainwright.checkpointing.protocol import Files
from trainwright.collectives import ShardSpec

from .catalog import Saved
from .header import read_header
from .index import DataFile, Located, Piece, digest, located_row, parse_located_row
from .manifest import file_name
from .ranks import Ranks, attempt

T = TypeVar("T")


def locate(
    ranks: Ranks, files: Files, saved: Saved, wanted: Mapping[str, ShardSpec | None]
) -> dict[str, Located | None]:
    """Return where each wanted tensor lies; for more than one question use `Index`.

    Args:
        ranks: The ranks; each calls it with what it wants.
        files: The file system.
        saved: The checkpoint.
        wanted: By path which part of the tensor; None: all of it.

    Returns:
        For each path the tensor with the pieces that may hold elements of the wanted part, None
        where the checkpoint has no tensor of that path.

    Raises:
        DamagedCheckpointError: What is said of the files is not what was written.
        LoadFailedError: A rank could not read.

    Communicates: see `Index`.
    """
    return Index(ranks, files, saved).locate(wanted)


class Index:
    """What the ranks know together of a checkpoint's tensors: each name is known to one of them.

    Every rank makes one and calls its methods, in the same order.

    Args:
        ranks: The ranks.
        files: The file system.
        saved: The checkpoint.

    Raises:
        DamagedCheckpointError: What is said of the files is not what was written.
        LoadFailedError: A rank could not read.

    Communicates: of format 1, whose files describe themselves, an all-to-all of the descriptions.
    """

    def __init__(self, ranks: Ranks, files: Files, saved: Saved) -> None:
        self._ranks = ranks
        self._doing = f"{saved.folder} was not loaded"
        self._known = self._read_headers(files, saved)

    @property
    def names(self) -> set[str]:
        """The names that this rank knows of; each name is known to exactly one rank."""
        return set(self._known)

    def locate(self, wanted: Mapping[str, ShardSpec | None]) -> dict[str, Located | None]:
        """Return where each wanted tensor lies; see the function `locate`.

        Communicates: two all-to-alls: the wanted paths and parts, and what is known of them.
        """
        size = self._ranks.comm.size
        asked: list[list[Any]] = [[] for _ in range(size)]
        for path, spec in wanted.items():
            asked[digest(path)[0] % size].append([path, None if spec is None else spec.to_json()])
        questions = self._ranks.exchange_bytes([_dump(part) for part in asked])
        answers = self._agreed(lambda: [self._answer(json.loads(part)) for part in questions])
        heard = self._ranks.exchange_bytes(answers)
        found: dict[str, Located | None] = dict.fromkeys(wanted)
        for part in heard:
            found.update(parse_located_row(row) for row in json.loads(part))
        return found

    def _answer(self, questions: list[Any]) -> bytes:
        rows = []
        for path, described in questions:
            known = self._known.get(path)
            if known is not None:
                spec = None if described is None else ShardSpec.from_json(described)
                rows.append(located_row(path, known.overlapping(spec)))
        return _dump(rows)

    def _read_headers(self, files: Files, saved: Saved) -> dict[str, Located]:
        """Read every size-th file's header and send what it says to the ranks that keep it."""
        size = self._ranks.comm.size

        def read() -> list[bytes]:
            parts: list[list[Any]] = [[] for _ in range(size)]
            for number in range(self._ranks.comm.rank, len(saved.manifest.files), size):
                for path, located in _read_header(files, saved, number).items():
                    parts[digest(path)[0] % size].append(located_row(path, located))
            return [_dump(part) for part in parts]

        heard = self._ranks.exchange_bytes(self._agreed(read))
        return self._agreed(lambda: _join(heard, saved))

    def _agreed(self, work: Callable[[], T]) -> T:
        result, error = attempt(work)
        self._ranks.agree(error, self._doing, LoadFailedError)
        return result  # type: ignore[return-value]  # without an error there is a result


def _read_header(files: Files, saved: Saved, number: int) -> dict[str, Located]:
    record = saved.manifest.files[number]
    if record is None:
        return {}
    path = saved.folder / file_name(number)
    reader = files.open(path)
    try:
        start, header = read_header(reader, path, record.size, record.header_crc32)
    finally:
        reader.close()
    data_file = DataFile(number, record.size, header.block_bytes)
    table = start + header.table[0]
    found = {}
    for name, info in header.tensors.items():
        spec = attrs.evolve(info.spec, name=name, replicated=())
        piece = Piece(data_file, spec, start + info.begin, table + 4 * info.first_block)
        found[name] = Located(info.dtype, spec.global_shape, (piece,))
    return found


def _join(parts: list[bytes], saved: Saved) -> dict[str, Located]:
    joined: dict[str, Located] = {}
    for part in parts:
        for path, located in map(parse_located_row, json.loads(part)):
            known = joined.setdefault(path, located)
            if known is located:
                continue
            if (known.dtype, known.global_shape) != (located.dtype, located.global_shape):
                raise DamagedCheckpointError(
                    f"{saved.folder} is damaged: its files give {path!r} two dtypes or shapes"
                )
            joined[path] = attrs.evolve(known, pieces=known.pieces + located.pieces)
    return joined


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
