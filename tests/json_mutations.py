"""Damage to JSON that keeps it JSON, or nearly: values exchanged, dropped, doubled, made extreme.

It works on the text: a scan finds where each value stands, and damage replaces what stands there.
So an object may name a key twice, and numbers and texts may be written that no writer writes.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Sequence

import attrs

EXTREMES = (
    "0",
    "-0",
    "1",
    "-1",
    "2",
    "255",
    "65536",
    "2147483647",
    "2147483648",
    "-2147483648",
    "4294967296",
    "9007199254740993",
    "4611686018427387904",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775809",
    "18446744073709551616",
    "1" + "0" * 40,
    "9" * 5000,
    "0.5",
    "1.0",
    "1e308",
    "1e400",
    "-1e400",
    "5e-324",
    "NaN",
    "Infinity",
    "-Infinity",
    "null",
    "true",
    "false",
    '""',
    '"0"',
    '"x"',
    "[]",
    "{}",
    "[[]]",
    "[null]",
    '{"":null}',
    '"nan"',
    '"../x"',
    '"/etc/passwd"',
    '"a\\u0000b"',
    '"\\ud800"',
    '"\\u202e"',
    '"%s{}"',
    '"' + "x" * 3000 + '"',
)
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[^\s,:{}\[\]"]+|[{}\[\]:,]')
_DEPTHS = (101, 1000, 20_000)
_COUNTS = (2, 65, 1100)


@attrs.frozen
class Place:
    """Where a value stands in the text: ``begin`` to ``end``; its key, if any, from ``key``.

    ``key_end`` is where the key ends; both are -1 for what has no key.
    """

    begin: int
    end: int
    key: int
    key_end: int


@functools.lru_cache(maxsize=64)
def places(data: bytes) -> tuple[Place, ...]:
    """Return where each value of a JSON text stands, or nothing where it is no JSON."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return ()
    found: list[Place] = []
    open_values: list[tuple[int, int, int, bool]] = []  # begin, key, its end, whether an object
    key = key_end = -1
    last: tuple[int, int] | None = None
    for token in _TOKEN.finditer(data):
        text = token[0]
        if text == b":" and last is not None:
            key, key_end = last
            found.pop()  # what was taken for a value was a key
        elif text in (b"{", b"["):
            open_values.append((token.start(), key, key_end, text == b"{"))
            key = key_end = -1
        elif text in (b"}", b"]"):
            begin, of, of_end, _ = open_values.pop()
            found.append(Place(begin, token.end(), of, of_end))
            key = key_end = -1
        elif text != b",":
            found.append(Place(token.start(), token.end(), key, key_end))
            last = token.span()
            key = key_end = -1
    return tuple(found)


def mutate_json(data: bytes, seeds: Sequence[bytes], rng: random.Random) -> bytes | None:
    """Return ``data`` with one value or key changed, or None where it is no JSON."""
    found = places(data)
    if not found:
        return None
    place = rng.choice(found)
    old = data[place.begin : place.end]
    if place.key >= 0 and rng.random() < 0.3:
        return _change_key(data, place, found, rng)
    if rng.random() < 0.1:
        return _drop(data, place)
    new = _replacement(old, data, found, seeds, rng)
    return data[: place.begin] + new + data[place.end :]


def _replacement(
    old: bytes,
    data: bytes,
    found: Sequence[Place],
    seeds: Sequence[bytes],
    rng: random.Random,
) -> bytes:
    kind = rng.random()
    if kind < 0.15 and old.lstrip(b"-").isdigit():
        near = int(old[:30]) + rng.choice((-1, 1, 2, 16, 1000))
        return rng.choice((str(near), str(-near), f'"{near}"', f"{near}.0")).encode()
    if kind < 0.3 and old[:1] == b'"':
        return _text(old, rng)
    if kind < 0.65:
        return rng.choice(EXTREMES).encode()
    if kind < 0.8:
        other = rng.choice(found)
        return data[other.begin : other.end]
    if kind < 0.88:
        text = rng.choice(seeds)
        there = places(text)
        other = rng.choice(there) if there else Place(0, 0, -1, -1)
        return text[other.begin : other.end]
    if kind < 0.97:
        count = rng.choice(_COUNTS) if len(old) < 200 else 2
        return rng.choice((b"[%s]" % old, b'{"x":%s}' % old, b"[%s]" % b",".join([old] * count)))
    depth = rng.choice(_DEPTHS)
    return rng.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth))


def _text(old: bytes, rng: random.Random) -> bytes:
    inner = old[1:-1]
    at = rng.randrange(len(inner) + 1)
    odd = rng.choice((b"\\ud800", b"\\u0000", b"\xff", b"\\n", b"x", b" ", b"/", b"..", b"\\u0661"))
    return b'"%s"' % rng.choice(
        (inner[:at] + odd + inner[at:], inner[:at], inner.upper(), inner[::-1], inner * 2)
    )


def _change_key(data: bytes, place: Place, found: Sequence[Place], rng: random.Random) -> bytes:
    pair = data[place.key : place.end]
    named = [other for other in found if other.key >= 0]
    other = rng.choice(named)
    match rng.randrange(4):
        case 0:  # the same key twice
            return data[: place.key] + pair + b"," + data[place.key :]
        case 1:  # a key more
            more = rng.choice((b'"x"', b'""', b'"__tuple__"', b'"\\ud800"', b'"__proto__"'))
            return data[: place.key] + more + b":1," + data[place.key :]
        case 2:  # another's key
            new = data[other.key : other.key_end]
        case _:
            new = _text(data[place.key : place.key_end], rng)
    return data[: place.key] + new + data[place.key_end :]


def _drop(data: bytes, place: Place) -> bytes:
    """Return the text without a value, its key and the comma next to it."""
    begin = place.begin if place.key < 0 else place.key
    before, after = data[:begin].rstrip(), data[place.end :].lstrip()
    if after[:1] == b",":
        return before + after[1:]
    return (before[:-1] if before[-1:] == b"," else before) + after
