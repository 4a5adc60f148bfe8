"""Parameters that got no gradient: found on every rank before anything is reduced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trainwright.collectives import Communicator
from trainwright.sharding.data.agreement import all_gather_json
from trainwright.sharding.data.buckets import Bucket
from trainwright.sharding.data.errors import LifecycleError

_SHOWN = 5


def check_no_gradient_is_missing(
    buckets: Iterable[Bucket], agree: Communicator, ranks: Sequence[int]
) -> None:
    """Raise on every rank if a parameter has no gradient on one of them.

    Args:
        buckets: Those that are trained.
        agree: Joins the ranks that step together.
        ranks: What these are called in the message.

    Raises:
        LifecycleError: With the parameters and the ranks.

    Communicates:
        One all-reduce of 8 bytes, whose result the host reads; where something is missing also an
        all-gather of the names.
    """
    missing = [m.name for b in buckets for m in b.members if m.parameter.grad is None]
    count = torch.tensor(len(missing), device=agree.device)
    agree.all_reduce(count).wait()
    if not int(count):
        return
    without: dict[str, list[int]] = {}
    for rank, names in zip(ranks, all_gather_json(agree, missing), strict=True):
        for name in names:
            without.setdefault(name, []).append(rank)
    told = [_say(name, held, len(ranks)) for name, held in without.items()]
    more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    raise LifecycleError(
        f"no gradient in this step for {'; '.join(told[:_SHOWN])}{more}. Use every parameter on "
        "every rank, freeze what is not used, or choose missing_gradients='zero'; "
        "zero_grad(discard=True) drops what is there"
    )


def _say(name: str, ranks: list[int], of: int) -> str:
    if len(ranks) == of:
        return f"{name} (on every rank)"
    return f"{name} (on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
