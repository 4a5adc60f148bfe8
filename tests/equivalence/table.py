"""What the README says of the array, between two marks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.covering import Pair, pairs_of
from tests.equivalence.array import Entry
from tests.equivalence.factors import FACTORS, world_size

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- covered -->", "<!-- /covered -->"


def text(entries: Sequence[Entry], impossible: Mapping[Pair, str]) -> str:
    """Return the covered table in Markdown."""
    covered = {pair for entry in entries for pair in pairs_of(entry.row)}
    sampled = sum(entry.sampled for entry in entries)
    processes = sum(entry.processes for entry in entries)
    most = max(world_size(entry.row) for entry in entries)
    return "\n".join(
        [
            f"{len(entries)} rows of at most {most} ranks hold each of the {len(covered):,} pairs "
            "of values that a run can have.",
            f"{sampled} of them run by default, {processes} also as processes, over Gloo and over "
            "shared memory.",
            "",
            "| factor | values |",
            "|---|---|",
            *(f"| {name} | {', '.join(values)} |" for name, values in FACTORS.items()),
            "",
            f"{len(impossible)} pairs of values are refused whatever the others are:",
            "",
            "| number | such as | reason |",
            "|---|---|---|",
            *_refusals(impossible),
        ]
    )


def _refusals(impossible: Mapping[Pair, str]) -> list[str]:
    """Return a line for each kind of reason, with the first of its pairs."""
    number: Counter[str] = Counter()
    first: dict[str, str] = {}
    for ((one, value), (other, another)), reason in impossible.items():
        kind = _kind(reason)
        number[kind] += 1
        first.setdefault(kind, f"{one}={value}, {other}={another} | {_short(reason)}")
    return [f"| {number[kind]} | {line} |" for kind, line in first.items()]


def _kind(reason: str) -> str:
    """Return the rule, without the values that it was broken by."""
    rule = re.sub(r"(?<=--layout )\S+|(?<=--dtype )\S+|tiny\S*|(?<=--context )\w+", "", reason)
    return re.sub(r"\d+|queries|keys", "", _short(rule))


def _short(reason: str) -> str:
    """Return what is wrong, without the way out."""
    return reason.partition(";")[0]


def written() -> str:
    """Return what stands in the README now."""
    return README.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def write(covered: str) -> None:
    """Put the table into the README, between its marks."""
    before, _, rest = README.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{covered}\n{END}{after}")
