"""Where the pieces of a tensor lie in a checkpoint's files: the values, and their rows of JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trainwright.collectives import Box, ShardSpec

from .dtypes import dtype_name, parse_dtype

_Ints = npt.NDArray[np.int64]

MAX_BOXES = 1024  # a fused weight has three; comparing n boxes may cost n * n
_MAX_DIMS = 64
_MAX_NUMBER = 2**62


@attrs.frozen
class DataFile:
    """What a reader must know of a file of tensors before it opens it.

    Args:
        number: Which one of the checkpoint's.
        size: Its length in bytes.
        block_bytes: Bytes of a tensor under one checksum.
    """

    number: int
    size: int
    block_bytes: int


@attrs.frozen
class Piece:
    """A part of a tensor that one file holds; positions count from the beginning of the file.

    Args:
        file: The file.
        spec: Which part of the tensor it is; named by the path, without replicated axes.
        offset: Where its elements are, in the order of ``spec``.
        sums: Where the checksums of its blocks are, 4 little-endian bytes each; a block is
            ``file.block_bytes`` of the piece, the last one may be shorter.
    """

    file: DataFile
    spec: ShardSpec
    offset: int
    sums: int


@attrs.frozen
class Located:
    """A tensor of a checkpoint and where it is: pieces that together hold each element once."""

    dtype: torch.dtype
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Nearby:
    """Finds which pieces of a tensor may hold elements of a part of it, without comparing each.

    Args:
        located: The tensor.
    """

    def __init__(self, located: Located) -> None:
        self._located = located
        bounds = [find_bounds(piece.spec) for piece in located.pieces]
        shape = (len(bounds), len(located.global_shape))
        self._lows = np.array([low for low, _ in bounds], dtype=np.int64).reshape(shape)
        self._highs = np.array([high for _, high in bounds], dtype=np.int64).reshape(shape)

    def find(self, bounds: Sequence[Sequence[int]] | None) -> Located:
        """Return the tensor without the pieces that hold nothing within ``bounds``.

        All of them are left for None and for bounds of a tensor of other dims, which is an error
        elsewhere.
        """
        located = self._located
        if bounds is None or len(bounds[0]) != len(located.global_shape):
            return located
        low, high = np.array(bounds, dtype=np.int64)
        crosses = ((self._lows < high) & (low < self._highs)).all(axis=1)
        kept = tuple(located.pieces[number] for number in np.flatnonzero(crosses))
        return Located(located.dtype, located.global_shape, kept)


def find_bounds(spec: ShardSpec) -> tuple[list[int], list[int]]:
    """Return the corners of a box around all that ``spec`` holds, exact but for parts of rows."""
    lows: list[list[int]] = []
    highs: list[list[int]] = []
    before = 0
    for box in spec.boxes:
        numel = box.numel
        first, last = max(spec.start - before, 0), min(spec.stop - before, numel)
        before += numel
        if first >= last:
            continue
        low, high = list(box.start), list(box.stop)
        if low:
            row = numel // (high[0] - low[0])
            low[0], high[0] = low[0] + first // row, low[0] - (-last // row)
        lows.append(low)
        highs.append(high)
    if not lows:
        nothing = [0] * len(spec.global_shape)
        return nothing, nothing
    if len(lows) == 1:
        return lows[0], highs[0]
    return [min(ends) for ends in zip(*lows, strict=True)], [
        max(ends) for ends in zip(*highs, strict=True)
    ]


def digest(name: str) -> tuple[int, int]:
    """Return a hash of a name as two integers of 64 bits, the same in every process."""
    data = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return (
        int.from_bytes(data[:8], "little", signed=True),
        int.from_bytes(data[8:], "little", signed=True),
    )


def piece_row(spec: ShardSpec, offset: int, sums: int, file: Sequence[int]) -> list[Any]:
    """Return a piece as JSON; ``file``: what stands for its file, a number or a few."""
    boxes = [[*box.start, *box.stop] for box in spec.boxes]
    return [*file, offset, sums, spec.start, spec.stop, boxes]


def located_row(path: str, located: Located) -> list[Any]:
    """Return a tensor with all that is known of its files as JSON."""
    pieces = [
        piece_row(piece.spec, piece.offset, piece.sums, attrs.astuple(piece.file))
        for piece in located.pieces
    ]
    return [path, dtype_name(located.dtype), list(located.global_shape), pieces]


def parse_located_row(row: Any) -> tuple[str, Located]:
    """Return what `located_row` was given.

    Raises:
        ValueError: Or any other error of malformed data: it is not such a row.
    """
    path, dtype, shape = parse_head(row)
    pieces: list[Piece] = []
    for number, size, block_bytes, *rest in row[3]:
        file = DataFile(*check_numbers([number, size, block_bytes]))
        pieces.append(parse_piece(path, dtype, shape, file, rest, pieces))
    return path, Located(dtype, shape, tuple(pieces))


def parse_head(row: Any) -> tuple[str, torch.dtype, tuple[int, ...]]:
    """Return the path, dtype and shape with which a row begins.

    Raises:
        ValueError: Or any other error of malformed data: it is not such a row.
    """
    path, name, sizes, _ = row
    dtype = parse_dtype(name)
    if type(path) is not str or dtype is None:
        raise ValueError(f"{path!r} has the dtype {name!r}")
    shape = tuple(check_numbers(sizes))
    if len(shape) > _MAX_DIMS or math.prod(max(size, 1) for size in shape) > _MAX_NUMBER:
        raise ValueError(f"{path!r} has the shape {shape}")
    return path, dtype, shape


def parse_piece(
    path: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    file: DataFile,
    row: Any,
    before: Sequence[Piece] = (),
) -> Piece:
    """Return the piece of which `piece_row` made ``row``, every number of it checked.

    Args:
        path: The tensor's path.
        dtype: Its dtype.
        shape: Its global shape.
        file: Where the piece is.
        row: What is said of it.
        before: Pieces of the same tensor; the boxes of the last one are often the same.

    Raises:
        ValueError: Or any other error of malformed data: it is not such a row.
    """
    offset, sums, start, stop, corners = row
    check_numbers([offset, sums, start, stop])
    if file.block_bytes < 16 or file.block_bytes % 16:
        raise ValueError(f"file {file.number} has blocks of {file.block_bytes} bytes")
    if len(corners) > MAX_BOXES:
        raise ValueError(f"{path!r} has {len(corners)} boxes")
    boxes = before[-1].spec.boxes if before else ()
    if [(*box.start, *box.stop) for box in boxes] != [tuple(both) for both in corners]:
        dims = len(shape)
        boxes = tuple(Box(both[:dims], both[dims:]) for both in map(check_numbers, corners))
    spec = ShardSpec(path, shape, boxes, start, stop)
    num_bytes = spec.numel * dtype.itemsize
    num_blocks = -(-num_bytes // file.block_bytes)
    if offset + num_bytes > file.size or sums + 4 * num_blocks > file.size:
        raise ValueError(f"{path!r} lies at {offset} and {sums} of {file.size} bytes")
    return Piece(file, spec, offset, sums)


def dump_rows(tensors: Iterable[tuple[str, Located]]) -> bytes:
    """Return tensors with all that is known of their files, for another rank."""
    rows = [located_row(path, located) for path, located in tensors]
    return json.dumps(rows, separators=(",", ":")).encode("ascii")


def load_rows(parts: Iterable[bytes]) -> dict[str, Located]:
    """Return what `dump_rows` was given on all ranks; pieces of one tensor are brought together.

    Raises:
        ValueError: Two say another dtype or shape of the same tensor.
    """
    joined: dict[str, Located] = {}
    pieces: dict[str, list[Piece]] = {}
    for part in parts:
        for path, located in map(parse_located_row, json.loads(part)):
            known = joined.setdefault(path, located)
            if (known.dtype, known.global_shape) != (located.dtype, located.global_shape):
                raise ValueError(f"two dtypes or shapes are given to {path!r}")
            pieces.setdefault(path, []).extend(located.pieces)
    return {
        path: attrs.evolve(located, pieces=tuple(pieces[path])) for path, located in joined.items()
    }


def check_numbers(values: Iterable[Any]) -> list[int]:
    """Return the values if each is a whole number of less than 63 bits.

    Raises:
        ValueError: One is not.
    """
    numbers = list(values)
    if not all(type(value) is int and 0 <= value <= _MAX_NUMBER for value in numbers):
        raise ValueError(f"{numbers!r} are no counts")
    return numbers
