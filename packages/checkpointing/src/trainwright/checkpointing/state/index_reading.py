"""Finds where tensors lie, each rank asking for what it wants and no rank seeing all names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import attrs

from trainwright.checkpointing.errors import DamagedCheckpointError, LoadFailedError
from trainwright.checkpointing.protocol import Files
from trainwright.collectives import ShardSpec

from .catalog import Saved, check_length
from .header import read_header
from .index import (
    DataFile,
    Located,
    Nearby,
    Piece,
    digest,
    dump_rows,
    find_bounds,
    load_rows,
)
from .index_file import IndexPart, read_index_part
from .manifest import Manifest, file_name
from .ranks import Ranks
from .tensor_file import FileRecord

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
    """What the ranks know together of the tensors of a checkpoint, all of whose files are there.

    Every rank makes one and calls its methods, in the same order. A rank reads at most one index
    file where there are more ranks than those; ranks ask the nearest that has read what they need.

    Args:
        ranks: The ranks.
        files: The file system.
        saved: The checkpoint.

    Raises:
        DamagedCheckpointError: A file is missing or has another length, or what is said of the
            files is not what was written.
        LoadFailedError: A rank could not read.

    Communicates: two all-to-alls of 16 bytes for each file, whose length is looked at by one rank.
    Of format 1, whose files describe themselves, instead two of the descriptions.
    """

    def __init__(self, ranks: Ranks, files: Files, saved: Saved) -> None:
        self._ranks = ranks
        self._doing = f"{saved.folder} was not loaded"
        self._readers = _Readers(ranks.comm.rank, ranks.comm.size, saved.manifest)
        if saved.manifest.files is not None:
            self._known = self._read_headers(files, saved, saved.manifest.files)
        else:
            self._known = self._read_parts(files, saved)
        self._nearby: dict[str, Nearby] = {}

    @property
    def names(self) -> frozenset[str]:
        """The names of which this rank speaks; for each name exactly one rank does."""
        return frozenset(self._known) if self._readers.speaks else frozenset()

    def locate(self, wanted: Mapping[str, ShardSpec | None]) -> dict[str, Located | None]:
        """Return where each wanted tensor lies; see the function `locate`.

        Communicates: four all-to-alls: the wanted paths and parts, and what is known of them.
        """
        asked: list[list[Any]] = [[] for _ in range(self._ranks.comm.size)]
        for path, spec in wanted.items():
            bounds = None if spec is None else find_bounds(spec)
            asked[self._readers.of(path)].append([path, bounds])
        questions = self._ranks.exchange_bytes(
            [json.dumps(part, separators=(",", ":")).encode("ascii") for part in asked]
        )
        answers = self._ranks.exchange_bytes([self._answer(json.loads(part)) for part in questions])
        return {**dict.fromkeys(wanted), **load_rows(answers)}

    def _answer(self, questions: list[Any]) -> bytes:
        def known() -> Iterator[tuple[str, Located]]:
            for path, bounds in questions:
                if path not in self._known:
                    continue
                if path not in self._nearby:
                    self._nearby[path] = Nearby(self._known[path])
                yield path, self._nearby[path].find(bounds)

        return dump_rows(known())

    def _read_parts(self, files: Files, saved: Saved) -> dict[str, Located]:
        """Read this rank's index files; look at the lengths of its share of the other files."""
        size = self._ranks.comm.size

        def read() -> list[IndexPart]:
            numbers = self._readers.parts
            return [read_index_part(files, saved.folder, saved.manifest, k) for k in numbers]

        parts = self._agreed(read)
        rows: list[list[list[int]]] = [[] for _ in range(size)]
        for part in parts if self._readers.speaks else ():
            for number, (file, _) in part.files.items():
                if number % part.of == part.number:
                    rows[number % size].append([number, file.size])
        told = [row for rows_of in self._ranks.exchange(rows, 2) for row in rows_of]

        def look() -> None:
            for number, length in told:
                check_length(files, saved.folder / file_name(number), length)

        self._agreed(look)
        return {path: located for part in parts for path, located in part.tensors.items()}

    def _read_headers(
        self, files: Files, saved: Saved, records: tuple[FileRecord | None, ...]
    ) -> dict[str, Located]:
        """Read every size-th file's header and send what it says to the ranks that keep it."""
        rank, size = self._ranks.comm.rank, self._ranks.comm.size

        def read() -> list[bytes]:
            parts: list[list[tuple[str, Located]]] = [[] for _ in range(size)]
            for number in range(rank, len(records), size):
                for path, located in _read_header(files, saved, number, records[number]).items():
                    parts[self._readers.of(path)].append((path, located))
            return [dump_rows(part) for part in parts]

        heard = self._ranks.exchange_bytes(self._agreed(read))
        try:
            known, error = load_rows(heard), None
        except ValueError as problem:
            known, error = {}, DamagedCheckpointError(f"{saved.folder} is damaged: {problem}")
        self._ranks.agree(error, self._doing, LoadFailedError)
        return known

    def _agreed(self, work: Callable[[], T]) -> T:
        return self._ranks.agreed(work, self._doing, LoadFailedError)


@attrs.frozen
class _Readers:
    """Which rank reads which index files, and whom this one asks about a name."""

    rank: int
    size: int
    manifest: Manifest

    @property
    def of_files(self) -> int:
        """The number of index files; of format 1, as many parts as there are ranks."""
        return len(self.manifest.index) or self.size

    @property
    def parts(self) -> range:
        """The index files that this rank reads.

        With n of them and more ranks, every n consecutive ranks read all of them once.
        """
        if self.of_files > self.size:
            return range(self.rank, self.of_files, self.size)
        number = self.rank % self.of_files
        return range(number, number + 1)

    @property
    def speaks(self) -> bool:
        """Whether this rank is one of the first that read all index files."""
        return self.rank < self.of_files

    def of(self, path: str) -> int:
        """Return the rank that this one asks about ``path``."""
        number = digest(path)[0] % self.of_files
        if self.of_files > self.size:
            return number % self.size
        nearest = self.rank // self.of_files * self.of_files + number
        return nearest if nearest < self.size else number


def _read_header(
    files: Files, saved: Saved, number: int, record: FileRecord | None
) -> dict[str, Located]:
    if record is None:
        return {}
    path = saved.folder / file_name(number)
    try:
        reader = files.open(path)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is damaged: it is not there") from error
    try:
        start, header = read_header(reader, path, record.size, record.header_crc32)
    finally:
        reader.close()
    data_file = DataFile(number, record.size, header.block_bytes)
    table = start + header.table[0]
    found = {}
    for name, info in header.tensors.items():
        piece = Piece(data_file, info.spec, start + info.begin, table + 4 * info.first_block)
        found[name] = Located(info.dtype, info.spec.global_shape, (piece,))
    return found


def read_records(files: Files, saved: Saved) -> dict[int, FileRecord]:
    """Return by number what is said of each file of tensors; for one process that reads them all.

    Raises:
        OSError: An index file cannot be read.
        DamagedCheckpointError: One is not what was written.
    """
    manifest = saved.manifest
    if manifest.files is not None:
        return {k: record for k, record in enumerate(manifest.files) if record is not None}
    records: dict[int, FileRecord] = {}
    for number in range(len(manifest.index)):
        part = read_index_part(files, saved.folder, manifest, number)
        records.update((number, record) for number, (_, record) in part.files.items())
    return records


def check_complete(files: Files, saved: Saved) -> None:
    """Raise unless all files of a checkpoint are there at their full length; for one process.

    Raises:
        OSError: A file cannot be read.
        DamagedCheckpointError: One is missing or has another length.
    """
    for number, record in read_records(files, saved).items():
        check_length(files, saved.folder / file_name(number), record.size)
