"""Outputs that several ranks compute alike: their gradient as one rank would have it."""

# Shapes: ... any leading dims, O out_features; U the rows used on this rank.

from __future__ import annotations

from typing import Any

import torch

from trainwright.collectives import Communicator
from trainwright.sharding.tensor.cuts import Cut


def sum_shared_rows(output: torch.Tensor, tp: Communicator, cut: Cut) -> torch.Tensor:
    """Return the output; its gradient comes summed, on the first rank that has a row.

    Plain products are linear: each rank's term of the gradient of a shared row may go through them
    and the results be summed. Products that round their operands are not: they want the sum, which
    is to count once, so that the other ranks go on with zeros.

    Args:
        output: ``[..., U]``.
        tp: The tensor-parallel ranks.
        cut: Which of the O rows each of them computes.

    Communicates:
        Forward nothing, backward one all-reduce of ``[..., O]``; nothing where no row is shared.
    """
    if tp.size == 1 or cut.is_partition:
        return output
    summed: torch.Tensor = _SumSharedRows.apply(output, tp, cut)  # type: ignore[no-untyped-call]
    return summed


class _SumSharedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, tp: Communicator, cut: Cut) -> torch.Tensor:
        ctx.tp, ctx.cut = tp, cut
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        tp, cut = ctx.tp, ctx.cut
        device = gradient.device
        used = torch.tensor(cut.indices(tp.rank), dtype=torch.long, device=device)
        terms = gradient.new_zeros((*gradient.shape[:-1], cut.size))
        terms.index_copy_(-1, used, gradient)
        tp.all_reduce(terms).wait()
        earlier = {row for rank in range(tp.rank) for row in cut.indices(rank)}
        counts = [row not in earlier for row in cut.indices(tp.rank)]
        mine = torch.tensor(counts, dtype=torch.bool, device=device)
        return terms.index_select(-1, used).where(mine, 0.0), None, None
