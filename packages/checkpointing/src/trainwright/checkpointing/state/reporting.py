"""What a load says of what did not fit, the same on every rank though none knows all names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import attrs

from .index import digest
from .ranks import Ranks

MAX_REPORTED = 100


@attrs.frozen
class LoadReport:
    """What a partial load did.

    Args:
        tree: The state: the target's tensors, and the plain values of checkpoint and target.
        run: The run of the checkpoint.
        step: Its step.
        missing: Paths that the checkpoint does not have, of all ranks, sorted, at most 100: tensors
            and plain values that are as they were in the target.
        num_missing: How many there are.
        missing_here: All of this rank's.
        unexpected: Paths of the checkpoint that no rank's target has, sorted, at most 100.
        num_unexpected: How many there are.
        skipped: This rank's paths that were not looked for, as asked.
        converted: This rank's tensors whose dtype was changed, as asked.
    """

    tree: dict[str, Any] = attrs.field(repr=False)
    run: str
    step: int
    missing: tuple[str, ...]
    num_missing: int
    missing_here: tuple[str, ...]
    unexpected: tuple[str, ...]
    num_unexpected: int
    skipped: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a line on the whole and one on each kind of difference."""
        lines = [f"step {self.step} of run {self.run!r} was loaded"]
        for names, count, what in (
            (self.missing, self.num_missing, "not in the checkpoint, left as they were"),
            (self.unexpected, self.num_unexpected, "in the checkpoint only"),
            (self.skipped, len(self.skipped), "skipped"),
            (self.converted, len(self.converted), "given another dtype"),
        ):
            if count:
                more = f", and {count - len(names)} more" if count > len(names) else ""
                lines.append(f"  {count} {what}: {', '.join(names)}{more}")
        return "\n".join(lines)


def gather_lines(ranks: Ranks, lines: Sequence[str], limit: int) -> tuple[list[str], int]:
    """Return up to ``limit`` of all ranks' lines, sorted, and how many there are without twins.

    Args:
        ranks: The ranks; all get the same.
        lines: This rank's.
        limit: The most to return.

    Communicates: an all-reduce of 8 bytes. If there are lines, four all-to-alls of 32 bytes a line
    besides, a gather of 8 bytes a rank, and the lines that are returned.
    """
    if ranks.total(len(lines)) == 0:
        return [], 0
    own = _first_told_here(ranks, lines)
    counts = [row[0] for row in ranks.gather([len(own)])]
    shares: dict[int, int] = {}
    for rank, count in enumerate(counts):
        share = min(count, limit - sum(shares.values()))
        if share:
            shares[rank] = share
    plan = json.loads(ranks.broadcast(json.dumps([sum(counts), [*shares.items()]]).encode()))
    gathered: list[str] = []
    for rank, share in plan[1]:
        told = ranks.broadcast(json.dumps(own[:share]).encode("ascii"), rank)
        gathered.extend(json.loads(told))
    return sorted(gathered), plan[0]


def _first_told_here(ranks: Ranks, lines: Sequence[str]) -> list[str]:
    """Return this rank's lines that no rank before it has."""
    comm = ranks.comm
    unique = sorted(set(lines))
    asked: list[list[str]] = [[] for _ in range(comm.size)]
    for line in unique:
        asked[digest(line)[0] % comm.size].append(line)
    told = ranks.exchange([[[*digest(line)] for line in part] for part in asked], 2)
    first: dict[tuple[int, ...], int] = {}
    for rank, rows in enumerate(told):
        for row in rows:
            first.setdefault(tuple(row), rank)
    answers = ranks.exchange([[[first[tuple(row)]] for row in rows] for rows in told], 1)
    return [
        line
        for part, rows in zip(asked, answers, strict=True)
        for line, (rank,) in zip(part, rows, strict=True)
        if rank == comm.rank
    ]
