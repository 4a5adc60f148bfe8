"""What ranks tell each other about their gradients, so that all of them raise alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch

from trainwright.collectives.buckets.errors import UnusedParameterError
from trainwright.collectives.buckets.parameters import shown
from trainwright.collectives.buckets.plan import BucketPlan
from trainwright.collectives.calls import describe_dtype
from trainwright.collectives.errors import UsageError
from trainwright.collectives.headers import Header, digest_of, name_ranks, tell_groups
from trainwright.collectives.objects import all_gather_object
from trainwright.collectives.protocol import Communicator
from trainwright.collectives.uneven import gather_headers


def agree_on_plan(
    comm: Communicator, settings: str, plan: BucketPlan | None, problem: str | None
) -> None:
    """Raise on every rank where one has a problem or the plans differ, naming what differs.

    Args:
        comm: The ranks.
        settings: What else must be alike.
        plan: This rank's, or None where it has a problem.
        problem: What keeps this rank from having a plan.

    Communicates:
        An all-gather of 256 bytes a rank; before an error one of what is told.
    """
    rows = [settings]
    for number, bucket in enumerate(() if plan is None else plan.buckets):
        for slot in bucket.slots:
            like = f"{describe_dtype(bucket.dtype)}{list(slot.shape)}, strides {list(slot.strides)}"
            rows.append(f"{slot.name!r} {like}, in bucket {number}")
    headers = gather_headers(comm, Header(digest_of("\n".join(rows)), "", problem is None), None)
    if not all(header.number for header in headers):
        problems = enumerate(all_gather_object(comm, problem))
        raise UsageError(tell_groups({rank: text for rank, text in problems if text is not None}))
    if len({header.digest for header in headers}) == 1:
        return
    first, *others = all_gather_object(comm, rows)
    rank, theirs = next((r, rows) for r, rows in enumerate(others, 1) if rows != first)
    pairs = itertools.zip_longest(first, theirs, fillvalue="no further parameter")
    here, there = next(pair for pair in pairs if pair[0] != pair[1])
    raise UsageError(
        f"gradients lie differently on the ranks: rank 0 has {here} where rank {rank} has {there}. "
        "All ranks must give the same parameters in the same order and the same arguments"
    )


def agree_on_order(comm: Communicator, names: Sequence[str], came: Iterable[str]) -> list[str]:
    """Return the order in which rank 0's gradients came, then what has not come, on every rank.

    Communicates:
        A broadcast of 8 bytes a name.
    """
    order = list(dict.fromkeys([*came, *names]))
    number_of = {name: number for number, name in enumerate(names)}
    numbers = torch.tensor([number_of[name] for name in order], device=comm.device)
    comm.broadcast(numbers, 0).wait()
    return [names[number] for number in numbers.tolist()]


def raise_problems(comm: Communicator, problems: Sequence[str]) -> NoReturn:
    """Raise on every rank what went wrong on some.

    Communicates:
        As `all_gather_object`.
    """
    told = [
        f"rank {rank}: {problem}"
        for rank, found in enumerate(all_gather_object(comm, list(problems)))
        for problem in found
    ]
    raise UsageError(f"gradients were dropped on every rank: {shown(told, '; ')}")


def raise_unused(comm: Communicator, names: Sequence[str], uses: Sequence[bool]) -> NoReturn:
    """Raise on every rank which parameters got no gradient, and where.

    Communicates:
        As `all_gather_object`.
    """
    ranks_of: dict[str, list[int]] = {}
    used_by_rank = zip(*all_gather_object(comm, list(uses)), strict=True)
    for name, used in zip(names, used_by_rank, strict=True):
        if not all(used):
            ranks_of[name] = [rank for rank, is_used in enumerate(used) if not is_used]
    told = [
        f"{name} (on {'every rank' if len(ranks) == comm.size else name_ranks(ranks)})"
        for name, ranks in ranks_of.items()
    ]
    raise UnusedParameterError(
        f"no gradient since the last finish() for {shown(told)}. Use every parameter on "
        "every rank, freeze what is not used before making GradientBuckets, or pass "
        "allow_unused=True; all gradients were dropped on every rank",
        list(ranks_of),
    )
