"""Which documents are held out: a draw by name, so that a new one moves no other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

from trainwright.integration.data.sources.record import Record
from trainwright.integration.errors import DataError


def draw(name: str) -> float:
    """Return the number between 0 and 1 of a name."""
    digest = hashlib.blake2b(
        name.encode(errors="surrogateescape"), digest_size=8, person=b"held-out"
    ).digest()
    return int.from_bytes(digest, "little") / 2**64


def chosen(names: Iterable[str], share: float) -> Callable[[str], bool]:
    """Return which names are held out: at least one, and never all.

    Names are asked for only until it is clear that both kinds are there.

    Args:
        names: all names; two and more.
        share: about which share of them; 0 for none.
    """
    if share <= 0:
        return lambda name: False
    least: tuple[float, str] | None = None
    greatest: tuple[float, str] | None = None
    for name in names:
        drawn = (draw(name), name)
        least = drawn if least is None else min(least, drawn)
        greatest = drawn if greatest is None else max(greatest, drawn)
        if least[0] < share <= greatest[0]:
            return lambda name: draw(name) < share
    if least is None or greatest is None or least == greatest:
        return lambda name: False
    only, kept = least[1], greatest[1]
    if least[0] >= share:
        return lambda name: name == only
    return lambda name: name != kept


def split_rows(
    rows: Callable[[], Iterator[Record]], share: float, where: str
) -> Iterator[tuple[bool, Record]]:
    """Go through rows that have a name each, with whether it is held out.

    Raises:
        DataError: there is no row, or but one, from which nothing can be held out.
    """
    held_out = chosen((row.name for row in rows()), share)
    counts = [0, 0]
    for row in rows():
        held = held_out(row.name)
        counts[held] += 1
        yield held, row
    if not counts[0]:
        raise DataError(f"{where} holds no document")
    if share > 0 and not counts[1]:
        raise DataError(
            f"{where} holds one document, of which none can be held out; give --held-out PATH"
        )
