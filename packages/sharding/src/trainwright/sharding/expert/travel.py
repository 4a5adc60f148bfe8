"""The way of rows over ep, together with what is done to them before and after.

Rows that are only on their way lie in scratch memory, so that the backward keeps none of them and
no fresh memory is touched for them.
"""

# Shapes: N tokens, K experts of a token, A rows sent, R rows received, D model.

from __future__ import annotations

from typing import Any, cast

import torch

from trainwright.collectives import Communicator, differentiable
from trainwright.collectives.linear_maps import apply_linear
from trainwright.sharding.expert.ranks import ExpertRanks
from trainwright.sharding.expert.rows import scale_rows, sum_rows
from trainwright.sharding.expert.trip import Trip


def send_tokens(hidden_ND: torch.Tensor, trip: Trip, ranks: ExpertRanks) -> torch.Tensor:
    """Return the tokens that the ranks of ep have sent here [R, D].

    Communicates:
        One all-to-all over ep; backward one.
    """
    return apply_linear(
        hidden_ND,
        lambda tokens_ND: _send(tokens_ND, trip, ranks),
        lambda rows_RD: _bring_back(rows_RD, trip, ranks),
    )


def sum_returned(
    rows_RD: torch.Tensor, weights_NK: torch.Tensor, trip: Trip, ranks: ExpertRanks
) -> torch.Tensor:
    """Bring rows back to their tokens and return each token's weighted sum [N, D].

    Communicates:
        As `send_tokens`.
    """
    weights_NK = weights_NK.to(rows_RD.dtype)
    if not torch.is_grad_enabled():
        returned_AD = _exchange(rows_RD, ranks.ep, trip.sent, trip.received)
        return sum_rows(returned_AD, trip.choices, weights_NK)
    summed, _ = _ReturnedSum.apply(rows_RD, weights_NK, trip, ranks)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, summed)


class _ReturnedSum(torch.autograd.Function):
    """The weighted sum, and beside it what has returned over ep.

    Second derivatives need the way from the rows to what has returned: as an output it has one.
    """

    @staticmethod
    def forward(
        ctx: Any, rows_RD: torch.Tensor, weights_NK: torch.Tensor, trip: Trip, ranks: ExpertRanks
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        returned_AD = _exchange(rows_RD, ranks.ep, trip.sent, trip.received)
        ctx.save_for_backward(returned_AD, weights_NK)
        ctx.way = (trip, ranks)
        ctx.set_materialize_grads(False)
        summed_ND = sum_rows(returned_AD, trip.choices, weights_NK)
        return summed_ND, None if returned_AD is rows_RD else returned_AD

    @staticmethod
    def backward(
        ctx: Any, gradient_ND: torch.Tensor | None, of_returned: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        returned_AD, weights_NK = ctx.saved_tensors
        trip, ranks = ctx.way
        if gradient_ND is None or of_returned is not None or torch.is_grad_enabled():
            given = _gradients_again(ctx, gradient_ND, of_returned, returned_AD, weights_NK)
            return *given, None, None
        choices = trip.choices
        weights_A = weights_NK.flatten().index_select(0, choices.order)
        if ranks.ep.size == 1:
            of_AD = torch.empty_like(returned_AD)  # it stays: it is the gradient itself
        else:
            of_AD = ranks.scratch.take(returned_AD.shape[0], returned_AD)
        dots_A = scale_rows(gradient_ND, returned_AD, weights_A, choices, of_AD)
        of_weights = torch.zeros_like(weights_NK).flatten().index_copy(0, choices.order, dots_A)
        of_rows = _exchange(of_AD, ranks.ep, trip.received, trip.sent)
        return of_rows, of_weights.view_as(weights_NK), None, None


def _gradients_again(
    ctx: Any,
    gradient_ND: torch.Tensor | None,
    of_returned: torch.Tensor | None,
    returned_AD: torch.Tensor,
    weights_NK: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of rows and weights so that they have gradients themselves."""
    trip, ranks = ctx.way
    choices = trip.choices
    of_AD, of_weights = of_returned, None
    if gradient_ND is not None:
        ours_AD = gradient_ND.index_select(0, choices.token)
        scaled_AD = ours_AD * weights_NK.flatten().index_select(0, choices.order)[:, None]
        of_AD = scaled_AD if of_AD is None else of_AD + scaled_AD
        dots_A = (returned_AD * ours_AD).sum(-1)
        of_weights = torch.zeros_like(weights_NK).flatten().index_copy(0, choices.order, dots_A)
        of_weights = of_weights.view_as(weights_NK)
    if of_AD is None:
        return None, of_weights
    return differentiable.all_to_all(of_AD, ranks.ep, trip.received, trip.sent), of_weights


def _send(tokens_ND: torch.Tensor, trip: Trip, ranks: ExpertRanks) -> torch.Tensor:
    token_A = trip.choices.token
    if ranks.ep.size == 1:
        return tokens_ND.index_select(0, token_A)
    rows_AD = ranks.scratch.take(token_A.shape[0], tokens_ND)
    torch.index_select(tokens_ND, 0, token_A, out=rows_AD)
    return _exchange(rows_AD, ranks.ep, trip.received, trip.sent)


def _bring_back(rows_RD: torch.Tensor, trip: Trip, ranks: ExpertRanks) -> torch.Tensor:
    if ranks.ep.size == 1:
        return sum_rows(rows_RD, trip.choices)
    rows_AD = ranks.scratch.take(trip.choices.token.shape[0], rows_RD)
    ranks.ep.all_to_all(rows_AD, rows_RD.contiguous(), trip.sent, trip.received).wait()
    return sum_rows(rows_AD, trip.choices)


def _exchange(
    rows: torch.Tensor, comm: Communicator, received: tuple[int, ...], sent: tuple[int, ...]
) -> torch.Tensor:
    if comm.size == 1:
        return rows
    arrived = rows.new_empty((sum(received), rows.shape[1]))
    comm.all_to_all(arrived, rows.contiguous(), received, sent).wait()
    return arrived
