"""The index files of format 2: where the tensors lie whose names have the same hash.

    {"crc32": "...", "body": {
        "format": "trainwright-index", "version": 2,
        "number": k, "of": n,      a name belongs to the file k = hash of the name mod n
        "files":   [[file, size, block_bytes, header_crc32, table_crc32], ...],
        "tensors": [[path, dtype, shape, [[file, offset, sums, start, stop, boxes], ...]], ...]}}

``files`` has every file that a tensor here lies in, and those whose number mod n is k, so that each
file is described in one place that is known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from trainwright.checkpointing.errors import DamagedCheckpointError
from trainwright.checkpointing.protocol import Files
from trainwright.collectives import Box
from trainwright.collectives.overlap import find_crossing_boxes

from .dtypes import dtype_name
from .index import (
    DataFile,
    Located,
    Piece,
    check_numbers,
    digest,
    parse_head,
    parse_piece,
    piece_row,
)
from .manifest import FORMAT_VERSION, IndexRecord, Manifest, index_name
from .sealed import read_whole, seal, unseal
from .tensor_file import FileRecord

ENTRIES_PER_FILE = 4096


@attrs.frozen
class IndexPart:
    """The contents of one index file.

    Args:
        number: Which one.
        of: How many there are.
        files: By number the files that are described here, with their checksums.
        tensors: By path where the tensors lie.
    """

    number: int
    of: int
    files: Mapping[int, tuple[DataFile, FileRecord]]
    tensors: Mapping[str, Located]

    def encode(self) -> tuple[bytes, IndexRecord]:
        """Return the bytes of the file and what the manifest says of it."""
        files = [
            [number, file.size, file.block_bytes, record.header_crc32, record.table_crc32]
            for number, (file, record) in sorted(self.files.items())
        ]
        tensors = []
        for path, located in sorted(self.tensors.items()):
            pieces = [
                piece_row(piece.spec, piece.offset, piece.sums, [piece.file.number])
                for piece in located.pieces
            ]
            tensors.append([path, dtype_name(located.dtype), [*located.global_shape], pieces])
        data, crc32 = seal(
            {
                "format": "trainwright-index",
                "version": FORMAT_VERSION,
                "number": self.number,
                "of": self.of,
                "files": files,
                "tensors": tensors,
            }
        )
        return data, IndexRecord(len(data), crc32)


def count_index_files(num_ranks: int, num_entries: int) -> int:
    """Return into how many index files the pieces of all tensors go."""
    return max(1, min(num_ranks, -(-num_entries // ENTRIES_PER_FILE)))


def keeper_of(number: int, of: int, num_ranks: int) -> int:
    """Return the rank that writes index file ``number``; they are spread over the machines."""
    return number * num_ranks // of


def find_wrong_tiles(tensors: Mapping[str, Located]) -> list[str]:
    """Return which tensors' pieces share elements or leave some out."""
    problems = []
    for path, located in tensors.items():
        what = f"{path} {located.global_shape} {dtype_name(located.dtype)}"
        boxes = _boxes_of(located.pieces)
        crossing = find_crossing_boxes([box for _, box in boxes])
        if crossing is not None:
            (first, a), (second, b) = (boxes[number] for number in crossing)
            both = a.intersect(b)
            assert both is not None, "boxes that cross share elements"
            problems.append(
                f"{what}: elements {both.start} to {both.stop} (exclusive) are held by ranks "
                f"{first} and {second}; each element must be in one rank's spec, or the axes "
                "along which it is replicated be named there"
            )
        held, size = sum(box.numel for _, box in boxes), math.prod(located.global_shape)
        if crossing is None and held != size:
            problems.append(f"{what}: only {held} of its {size} elements are held by any rank")
    return problems


def _boxes_of(pieces: Sequence[Piece]) -> list[tuple[int, Box]]:
    """Return the boxes of all pieces and whose they are; those that only ranges divide are joined.

    Most tensors are one piece, or ranges of the same boxes: then there is little to compare.
    """
    shares: dict[tuple[Box, ...], list[Piece]] = {}
    for piece in pieces:
        shares.setdefault(piece.spec.boxes, []).append(piece)
    found: list[tuple[int, Box]] = []
    for boxes, sharing in shares.items():
        ranges = sorted((piece.spec.start, piece.spec.stop) for piece in sharing)
        ends = [0, *(stop for _, stop in ranges)]
        if [start for start, _ in ranges] == ends[:-1] and ends[-1] == sharing[0].spec.total:
            found += [(sharing[0].file.number, box) for box in boxes if box.numel]
            continue
        for piece in sharing:
            found += [(piece.file.number, box) for _, box in piece.spec.parts() if box.numel]
    return found


def read_index_part(files: Files, folder: Path, manifest: Manifest, number: int) -> IndexPart:
    """Return index file ``number`` of a checkpoint of format 2.

    Raises:
        OSError: It cannot be read.
        DamagedCheckpointError: It is missing or not what was written.
    """
    path = folder / index_name(number)
    record = manifest.index[number]
    try:
        body, crc32 = unseal(read_whole(files, path, record.size), path)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is damaged: it is not there") from error
    if crc32 != record.crc32:
        raise DamagedCheckpointError(
            f"{path} is damaged: expected checksum {record.crc32:08x}, found {crc32:08x}"
        )
    return decode_index_part(body, path, number, manifest)


def decode_index_part(body: Any, path: Path, number: int, manifest: Manifest) -> IndexPart:
    """Return the index file whose body is ``body``, every number of it checked.

    Raises:
        DamagedCheckpointError: It is not what `IndexPart.encode` writes.
    """
    try:
        return _parse(body, number, len(manifest.index), manifest.num_files)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error!r}") from error


def _parse(body: dict[str, Any], number: int, of: int, num_files: int) -> IndexPart:
    expected = ["trainwright-index", FORMAT_VERSION, number, of]
    found = [body[field] for field in ("format", "version", "number", "of")]
    if found != expected:
        raise ValueError(f"expected format, version, number, of {expected}, found {found}")
    files = dict(_parse_file(row, num_files) for row in body["files"])
    tensors: dict[str, Located] = {}
    for row in body["tensors"]:
        path, dtype, shape = parse_head(row)
        if path in tensors or digest(path)[0] % of != number:
            raise ValueError(f"{path!r} does not belong there")
        pieces: list[Piece] = []
        for file, *rest in row[3]:
            pieces.append(parse_piece(path, dtype, shape, files[file][0], rest, pieces))
        tensors[path] = Located(dtype, shape, tuple(pieces))
    return IndexPart(number, of, files, tensors)


def _parse_file(row: Iterable[Any], num_files: int) -> tuple[int, tuple[DataFile, FileRecord]]:
    number, size, block_bytes, header_crc32, table_crc32 = check_numbers(row)
    if number >= num_files:
        raise ValueError(f"file {number} of {num_files}")
    record = FileRecord(size, header_crc32, table_crc32)
    return number, (DataFile(number, size, block_bytes), record)
