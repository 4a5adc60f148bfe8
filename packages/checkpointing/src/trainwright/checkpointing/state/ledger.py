"""Accounts over all ranks, without any rank seeing all names.

Each name has one rank that keeps its account, found from a hash of the name. Ranks send what they
know of their names there and get verdicts back, so the traffic is that of what a rank holds.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from trainwright.checkpointing.errors import MismatchError, TreeError

from .dtypes import dtype_name
from .ranks import Ranks
from .tree import TensorLeaf

# What a rank says of a name, and what it hears back: a few integers.
Statement = tuple[int, ...]
Judge = Callable[[Sequence[Statement]], Statement]

_MAX_LISTED = 20


def check_written_once(ranks: Ranks, leaves: Iterable[TensorLeaf], written: set[str]) -> list[str]:
    """Return what is wrong with the names that this rank holds, if all ranks wrote ``written``.

    Every element of every tensor must be written by one rank, and the ranks must agree on shape
    and dtype. Here elements are counted; whether pieces overlap and leave an equal hole is seen
    where the index comes together, which hears of those that write and not of all that hold.

    Communicates: four all-to-alls, 64 bytes a name.
    """
    held = {leaf.path: leaf for leaf in leaves}
    statements: dict[str, Statement] = {}
    for path, leaf in held.items():
        size = _global_size(leaf)
        statements[path] = (_signature(leaf), leaf.spec.numel if path in written else 0, size)
    problems = []
    for path, (conflict, total, size) in _settle(ranks, statements, 3, _judge_writing).items():
        leaf = held[path]
        what = f"{path} {leaf.spec.global_shape} {dtype_name(leaf.tensor.dtype)}"
        if conflict:
            problems.append(f"{what}: another rank says another shape or dtype")
        elif total > size:
            problems.append(
                f"{what}: its {size} elements would be written {total / size:g} times; name the "
                "axes along which it is replicated in its spec"
            )
        elif total < size:
            problems.append(f"{what}: only {total} of its {size} elements are held by any rank")
    return problems


def find_unwanted(ranks: Ranks, wanted: Iterable[str], found: Iterable[str]) -> list[str]:
    """Return the names in this rank's ``found`` that no rank wants.

    Communicates: four all-to-alls, 40 bytes a name.
    """
    wanting = set(wanted)
    statements = {name: (int(name in wanting),) for name in {*wanting, *found}}
    verdicts = _settle(ranks, statements, 1, lambda rows: (max(row[0] for row in rows),))
    return sorted(name for name, verdict in verdicts.items() if verdict[0] == 0)


def raise_problems(
    problems: Sequence[str], doing: str, kind: type[MismatchError | TreeError]
) -> None:
    """Raise ``kind`` with a list of the problems, if there are any."""
    if problems:
        listed = [*problems[:_MAX_LISTED]]
        if len(problems) > _MAX_LISTED:
            listed.append(f"and {len(problems) - _MAX_LISTED} more")
        raise kind("\n  ".join([f"{doing}:", *listed]))


def _judge_writing(rows: Sequence[Statement]) -> Statement:
    signatures = {row[0] for row in rows}
    return int(len(signatures) > 1), sum(row[1] for row in rows), rows[0][2]


def _settle(
    ranks: Ranks, statements: Mapping[str, Statement], width: int, judge: Judge
) -> dict[str, Statement]:
    """Return for each of this rank's names what ``judge`` says of all ranks' statements on it.

    Statements and verdicts are ``width`` integers each.
    """
    size = ranks.comm.size
    names: list[list[str]] = [[] for _ in range(size)]
    outgoing: list[list[list[int]]] = [[] for _ in range(size)]
    for name, statement in statements.items():
        digest = _digest(name)
        keeper = digest[0] % size
        names[keeper].append(name)
        outgoing[keeper].append([*digest, *statement])
    incoming = ranks.exchange(outgoing, 2 + width)
    accounts: dict[tuple[int, int], list[Statement]] = defaultdict(list)
    for part in incoming:
        for first, second, *rest in part:
            accounts[first, second].append(tuple(rest))
    verdicts = {digest: judge(rows) for digest, rows in accounts.items()}
    answers = [[[*verdicts[row[0], row[1]]] for row in part] for part in incoming]
    heard = ranks.exchange(answers, width)
    return {
        name: tuple(row)
        for asked, told in zip(names, heard, strict=True)
        for name, row in zip(asked, told, strict=True)
    }


def _digest(name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return (
        int.from_bytes(digest[:8], "little", signed=True),
        int.from_bytes(digest[8:], "little", signed=True),
    )


def _signature(leaf: TensorLeaf) -> int:
    return _digest(f"{dtype_name(leaf.tensor.dtype)} {leaf.spec.global_shape}")[0]


def _global_size(leaf: TensorLeaf) -> int:
    size = 1
    for length in leaf.spec.global_shape:
        size *= length
    return size
