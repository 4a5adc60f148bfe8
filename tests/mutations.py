"""Damaged inputs for readers of outside bytes, each from two numbers: a seed and its place.

Most are small damage to a sound input, for a reader that refuses the first byte shows nothing of
what stands behind it: flipped bits, cuts, spliced inputs, numbers that became extreme. What parses
as JSON is also damaged as JSON (`tests.json_mutations`), what is text by its words and lines.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Iterator, Sequence

from tests.json_mutations import EXTREMES, mutate_json

Damage = Callable[[bytes, Sequence[bytes], random.Random], bytes]

_WORD = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?|[A-Za-z_]+|[^\sA-Za-z_0-9]")
_MAX_BYTES = 1 << 17
_INTEGERS = (0, 1, -1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63)
_ODD_BYTES = (
    b"\0",
    b"\xff",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\r",
    b"\n",
)


def mutant(seeds: Sequence[bytes], seed: int, index: int) -> bytes:
    """Return damaged input number ``index``; the same numbers give the same bytes anywhere.

    Args:
        seeds: Sound inputs; at least one.
        seed: Which sequence of inputs.
        index: Which of them.
    """
    rng = random.Random(seed * 2**64 + index)
    kind = rng.random()
    if kind < 0.01:
        return rng.randbytes(rng.randrange(64))
    data = rng.choice(seeds)
    steps = 1 if kind < 0.55 else rng.randint(2, 4)
    for _ in range(steps):
        data = _damage_once(data, seeds, rng)[:_MAX_BYTES]
    return data


def mutations(seeds: Sequence[bytes], seed: int, count: int, first: int = 0) -> Iterator[bytes]:
    """Yield ``count`` damaged inputs, from number ``first`` on."""
    for index in range(first, first + count):
        yield mutant(seeds, seed, index)


def _damage_once(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    if data[:1] in (b"{", b"[") and rng.random() < 0.7:
        changed = mutate_json(data, seeds, rng)
        if changed is not None:
            return changed
    if rng.random() < 0.5 and _is_text(data):
        return rng.choice(_OF_TEXT)(data, seeds, rng)
    return rng.choice(_OF_BYTES)(data, seeds, rng)


def _is_text(data: bytes) -> bool:
    return data.isascii() and b"\0" not in data[:64]


def _flip(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8)) if data else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _set_bytes(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    new = rng.choice((rng.randbytes(1), rng.randbytes(4), rng.choice(_ODD_BYTES)))
    return data[:at] + new + data[at + len(new) :]


def _set_integer(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    size = rng.choice((1, 2, 4, 8))
    if len(data) < size:
        return data
    at = rng.randrange(len(data) - size + 1)
    at -= at % size if rng.random() < 0.5 else 0  # formats like aligned numbers
    order = rng.choice(("little", "little", "big"))
    found = int.from_bytes(data[at : at + size], order)
    value = rng.choice((*_INTEGERS, found + 1, found - 1, found * 2, -found, len(data)))
    return data[:at] + (value % 2 ** (8 * size)).to_bytes(size, order) + data[at + size :]


def _set_float(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    code = rng.choice(("<f", "<d", ">d"))
    value = rng.choice((float("nan"), float("inf"), float("-inf"), -0.0, 1e30, -1.0, 5e-324))
    new = struct.pack(code, value)
    at = rng.randrange(len(data) + 1)
    return data[:at] + new + data[at + len(new) :]


def _insert(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    at = rng.choice((0, len(data), rng.randrange(len(data) + 1)))
    new = rng.choice((rng.randbytes(rng.randint(1, 16)), rng.choice(_ODD_BYTES), bytes(64)))
    return data[:at] + new + data[at:]


def _cut(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] if rng.random() < 0.8 else data[at:]


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    at = rng.randrange(len(data) + 1)
    longest = rng.choice((1, 4, 16, 64, len(data)))
    return at, min(len(data), at + rng.randint(0, longest))


def _remove(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    begin, end = _span(data, rng)
    return data[:begin] + data[end:]


def _repeat(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    begin, end = _span(data, rng)
    return data[:begin] + data[begin:end] * rng.choice((2, 2, 3, 100, 2000)) + data[end:]


def _move(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    begin, end = _span(data, rng)
    rest = data[:begin] + data[end:]
    at = rng.randrange(len(rest) + 1)
    return rest[:at] + data[begin:end] + rest[at:]


def _splice(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    other = rng.choice(seeds)
    begin, end = _span(other, rng)
    at, stop = _span(data, rng)
    if rng.random() < 0.5:
        return data[:at] + other[begin:]
    return data[:at] + other[begin:end] + data[stop:]


def _set_word(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    words = list(_WORD.finditer(data))
    if not words:
        return data
    found = rng.choice(words)
    others = [other for other in words if other[0] != found[0]]
    new = rng.choice(others)[0] if others and rng.random() < 0.4 else rng.choice(EXTREMES).encode()
    if rng.random() < 0.3 and found[0].lstrip(b"-").isdigit():
        new = str(int(found[0][:30]) + rng.choice((-1, 1, 1000))).encode()
    return data[: found.start()] + new + data[found.end() :]


def _change_lines(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    if not lines:
        return data
    at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            lines[at : at + 1] = []
        case 1:
            lines[at], lines[to] = lines[to], lines[at]
        case 2:
            lines.insert(to, lines[at])
        case _:
            lines[at : at + 1] = [lines[at]] * rng.choice((2, 50))
    return b"".join(lines)


def _change_cells(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes:
    mark = rng.choice(
        [each for each in (b",", b"\t", b" ", b":", b"=", b";") if each in data] or [b","]
    )
    cells = data.split(mark)
    at, to = rng.randrange(len(cells)), rng.randrange(len(cells))
    match rng.randrange(4):
        case 0:
            cells[at] = b""
        case 1:
            cells[at], cells[to] = cells[to], cells[at]
        case 2:
            cells[at] = rng.choice(EXTREMES).encode()
        case _:
            cells[at : at + 1] = []
    return mark.join(cells)


_OF_BYTES: tuple[Damage, ...] = (
    _flip,
    _flip,
    _set_bytes,
    _set_integer,
    _set_integer,
    _set_float,
    _insert,
    _cut,
    _remove,
    _repeat,
    _move,
    _splice,
)
_OF_TEXT: tuple[Damage, ...] = (_set_word, _set_word, _change_lines, _change_cells)
