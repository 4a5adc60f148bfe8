"""Where the pieces of a tensor lie in a checkpoint's files: the values, and their rows of JSON."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from trainwright.collectives import Box, ShardSpec

from .dtypes import dtype_name, parse_dtype

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

    def overlapping(self, spec: ShardSpec | None) -> Located:
        """Return it without the pieces that cannot share an element with ``spec``.

        None, or a spec of another shape, which has no such pieces, leaves it as it is.
        """
        if spec is None or spec.global_shape != self.global_shape or spec.numel == 0:
            return self
        wanted = _bounds(spec)
        kept = (piece for piece in self.pieces if _cross(_bounds(piece.spec), wanted))
        return attrs.evolve(self, pieces=tuple(kept))


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
    pieces = []
    for number, size, block_bytes, *rest in row[3]:
        file = DataFile(*check_numbers([number, size, block_bytes]))
        pieces.append(parse_piece(path, dtype, shape, file, rest))
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
    path: str, dtype: torch.dtype, shape: tuple[int, ...], file: DataFile, row: Any
) -> Piece:
    """Return the piece of which `piece_row` made ``row``, every number of it checked.

    Raises:
        ValueError: Or any other error of malformed data: it is not such a row.
    """
    offset, sums, start, stop, corners = row
    check_numbers([offset, sums, start, stop])
    if file.block_bytes < 16 or file.block_bytes % 16:
        raise ValueError(f"file {file.number} has blocks of {file.block_bytes} bytes")
    if len(corners) > MAX_BOXES:
        raise ValueError(f"{path!r} has {len(corners)} boxes")
    dims = len(shape)
    boxes = [Box(both[:dims], both[dims:]) for both in map(check_numbers, corners)]
    spec = ShardSpec(path, shape, boxes, start, stop)
    num_bytes = spec.numel * dtype.itemsize
    num_blocks = -(-num_bytes // file.block_bytes)
    if offset + num_bytes > file.size or sums + 4 * num_blocks > file.size:
        raise ValueError(f"{path!r} lies at {offset} and {sums} of {file.size} bytes")
    return Piece(file, spec, offset, sums)


def check_numbers(values: Iterable[Any]) -> list[int]:
    """Return the values if each is a whole number of less than 63 bits.

    Raises:
        ValueError: One is not.
    """
    numbers = list(values)
    if not all(type(value) is int and 0 <= value <= _MAX_NUMBER for value in numbers):
        raise ValueError(f"{numbers!r} are no counts")
    return numbers


def _bounds(spec: ShardSpec) -> tuple[list[int], list[int]]:
    """Return the corners of the smallest box around all that ``spec`` holds."""
    parts = [box for _, box in spec.parts()]
    dims = range(len(spec.global_shape))
    low = [min((box.start[dim] for box in parts), default=0) for dim in dims]
    high = [max((box.stop[dim] for box in parts), default=0) for dim in dims]
    return low, high


def _cross(a: tuple[list[int], list[int]], b: tuple[list[int], list[int]]) -> bool:
    below = all(first < end for first, end in zip(a[0], b[1], strict=True))
    return below and all(first < end for first, end in zip(b[0], a[1], strict=True))
