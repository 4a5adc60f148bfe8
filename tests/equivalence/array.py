"""The array as committed: its rows, the pairs that no row can hold, and what is run where."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from tests.covering import Cover, Pair, Row
from tests.equivalence.factors import FACTORS, NEEDED, refusal, world_size

FOLDER = Path(__file__).parent
ROWS = FOLDER / "rows.txt"
IMPOSSIBLE = FOLDER / "impossible.txt"
MARKS = ("sampled", "processes")
NUM_IN_PROCESSES = 12
MOST_PROCESSES = 8


@attrs.frozen
class Entry:
    """A row of the array.

    Args:
        number: of the row, from 1.
        row: its values.
        sampled: whether the default matrix runs it.
        processes: whether real processes run it as well.
    """

    number: int
    row: Row
    sampled: bool
    processes: bool

    @property
    def name(self) -> str:
        """The number and all values but the plainest."""
        words = [
            value if name in ("schedule", "dtype", "family", "optimizer") else f"{name}{value}"
            for name, value in self.row.items()
            if value != FACTORS[name][0]
        ]
        return "-".join([f"{self.number:03}", *(w.replace(":", "") for w in words)])


def read_rows() -> list[Entry]:
    """Return the committed rows."""
    lines = [line.split() for line in ROWS.read_text().splitlines() if line]
    names, entries = lines[0][1:], []
    for number, *values in lines[1:]:
        row = dict(zip(names, values, strict=True))
        marks = {mark: row.pop(mark) == "yes" for mark in MARKS}
        entries.append(Entry(int(number), row, **marks))
    return entries


def write_rows(entries: Sequence[Entry]) -> None:
    """Write rows as a table of words."""
    table = [["row", *FACTORS, *MARKS]]
    for entry in entries:
        marks = ["yes" if getattr(entry, mark) else "no" for mark in MARKS]
        table.append([str(entry.number), *entry.row.values(), *marks])
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = [
        " ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    ROWS.write_text("\n".join(lines) + "\n")


def read_impossible() -> dict[Pair, str]:
    """Return the pairs that no row holds, each with the words that refuse it."""
    found: dict[Pair, str] = {}
    for line in IMPOSSIBLE.read_text().splitlines():
        words, reason = line.split(" | ", 1)
        (one, value), (other, another) = (word.split("=", 1) for word in words.split())
        found[(one, value), (other, another)] = reason
    return found


def write_impossible(reasons: dict[Pair, str]) -> None:
    """Write pairs and reasons, one pair a line."""
    lines = [
        f"{one}={value} {other}={another} | {reason}"
        for ((one, value), (other, another)), reason in reasons.items()
    ]
    IMPOSSIBLE.write_text("\n".join(lines) + "\n")


def made(begin: Sequence[Row] = (), seed: int = 0) -> tuple[list[Entry], dict[Pair, str]]:
    """Search for an array of the factors as they are now, beginning with some rows."""
    known: dict[tuple[str, ...], str | None] = {}

    def refuse(row: Row) -> str | None:
        key = tuple(row.values())
        if key not in known:
            known[key] = refusal(row)
        return known[key]

    cover = Cover(FACTORS, refuse, needed=NEEDED, seed=seed)
    return marked(cover.run(begin), cover.impossible)


def marked(found: Sequence[Row], impossible: Sequence[Pair]) -> tuple[list[Entry], dict[Pair, str]]:
    """Return rows in order, with where they run, and pairs with the reasons."""
    rows = sorted(found, key=lambda row: (world_size(row), list(row.values())))
    sampled = _each_value_once(rows, len(rows), _cost)
    small = [row for row in rows if 1 < world_size(row) <= MOST_PROCESSES]
    processes = _each_value_once(small, NUM_IN_PROCESSES, world_size)
    entries = [
        Entry(number, row, row in sampled, row in processes) for number, row in enumerate(rows, 1)
    ]
    known = [*plain_rows(), *rows]
    return entries, {pair: reason_of(pair, known) for pair in impossible}


def reason_of(pair: Pair, rows: Sequence[Row]) -> str:
    """Return the words that refuse a pair.

    They are those that meet one of the values when it comes to a run that has the other one: if
    there is such a row, to one that takes either of the two alone.
    """
    (one, value), (other, another) = pair
    fallback = None
    for row in rows:
        both = {**row, one: value, other: another}
        if refusal({**both, other: row[other]}) is not None:
            continue
        reason = refusal(both)
        assert reason is not None, f"a row holds {pair}: {both}"
        if refusal({**both, one: row[one]}) is None:
            return reason
        fallback = fallback or reason
    assert fallback is not None, f"{one}={value} is refused alone"
    return fallback


def plain_rows() -> list[Row]:
    """Return rows that differ from the plainest in at most two values of factors that matter."""
    plainest = {name: values[0] for name, values in FACTORS.items()}
    near = (
        {**plainest, **dict(zip(names, values, strict=True))}
        for number in range(3)
        for names in itertools.combinations(NEEDED, number)
        for values in itertools.product(*(FACTORS[name][1:] for name in names))
    )
    return [row for row in near if refusal(row) is None]


def _cost(row: Row) -> float:
    """Return about how long a row takes, in no unit."""
    narrow = 3 if row["dtype"].startswith("fp8") else 1
    planned = 2 if row["communicator"] in ("rings", "trees") else 1
    return (4 + world_size(row)) * (2 + int(row["microbatches"])) * narrow * planned


def _each_value_once(rows: Sequence[Row], most: int, cost: Callable[[Row], float]) -> list[Row]:
    """Return few rows in which each value occurs that occurs in any, as far as so many have it."""
    open_values = {item for row in rows for item in row.items()}
    chosen: list[Row] = []
    while open_values and len(chosen) < most:
        best = max(rows, key=lambda row: len(open_values & set(row.items())) / cost(row))
        chosen.append(best)
        open_values -= set(best.items())
    return chosen
