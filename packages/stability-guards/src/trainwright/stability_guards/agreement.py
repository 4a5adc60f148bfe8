"""Bringing ranks to one verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.stability_guards.errors import GuardError, HaltError
from trainwright.stability_guards.protocol import Report, Totals, Verdict


@attrs.frozen
class Agreement:
    """The verdict that holds for all ranks, and the lowest rank that asked for it."""

    verdict: Verdict
    rank: int

    def raise_from(self, level: Verdict, why: str) -> None:
        """Raise on every rank alike where the verdict is at least ``level``.

        Raises:
            HaltError: naming the rank that asked for it.
        """
        if self.verdict >= level:
            raise HaltError(f"rank {self.rank} asks for {self.verdict.name}: {why}")


def agree(verdict: Verdict, communicator: Communicator) -> Agreement:
    """Take the greatest verdict of all ranks; call it at one fixed place in each step.

    Agree before the gradients are reduced where a rank may see a bad loss alone: a rank that
    leaves the step by itself lets the others wait for it.

    Args:
        verdict: what this rank thinks.
        communicator: the ranks to agree.

    Returns:
        The same agreement on every rank.

    Communicates:
        One MAX all-reduce of 8 bytes; the host waits for it.
    """
    size = communicator.size
    # The lowest rank with the greatest verdict has the greatest of these numbers.
    code = int(Verdict(verdict)) * size + size - 1 - communicator.rank
    ballot = torch.tensor(code, dtype=torch.int64, device=communicator.device)
    communicator.all_reduce(ballot, ReduceOp.MAX).wait()
    level, behind = divmod(int(ballot), size)
    return Agreement(Verdict(level), size - 1 - behind)


def verdict_from_counts(counts: torch.Tensor | Sequence[float]) -> Verdict:
    """Return the greatest verdict that at least one rank reached.

    Args:
        counts: how many ranks reached each verdict, one entry a level; a tensor makes the host
            wait.

    Raises:
        GuardError: not one entry a level.
    """
    values = counts.tolist() if isinstance(counts, torch.Tensor) else list(counts)
    if len(values) != len(Verdict):
        names = ", ".join(verdict.name for verdict in Verdict)
        raise GuardError(f"counts must hold {len(Verdict)} entries ({names}), got {len(values)}")
    return max((v for v in Verdict if values[v] > 0), default=Verdict.CONTINUE)


def report_from_totals(
    step: int,
    totals: Totals,
    *,
    loss_scale: float = 1.0,
    signals: Mapping[str, float | torch.Tensor] | None = None,
) -> Report:
    """Make the report of a step of what one all-reduce brought.

    Args:
        step: number of the step, counted from 0.
        totals: sums over all ranks.
        loss_scale: what the losses were multiplied by before the backward pass and the gradients
            still are; the report holds the true norm.
        signals: further numbers by name, 0-d where tensors; the same on every rank.

    Returns:
        The report; the host waits for the device once.
    """
    extra = {} if signals is None else dict(signals)
    device = totals.norm.device
    scalars = (totals.norm, totals.non_finite, totals.loss_sum, totals.tokens)
    packed = torch.cat(
        [
            torch.stack([value.double() for value in scalars]),
            totals.verdicts.double(),
            *(torch.as_tensor(v, device=device).double().reshape(1) for v in extra.values()),
        ]
    )
    norm, non_finite, loss_sum, tokens, *others = packed.tolist()
    counts, values = others[: len(others) - len(extra)], others[len(others) - len(extra) :]
    return Report(
        step=step,
        loss=loss_sum / tokens if tokens else 0.0,
        norm=norm / loss_scale,
        non_finite=int(non_finite),
        tokens=int(tokens),
        local_verdict=verdict_from_counts(counts),
        signals=dict(zip(extra, values, strict=True)),
    )
