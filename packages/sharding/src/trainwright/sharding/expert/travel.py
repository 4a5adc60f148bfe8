"""The way of rows over ep, together with what is done to them before and after.

Rows that are only on their way lie in scratch memory, so that the backward keeps none of them and
no fresh memory is touched for them.
"""

# Shapes: N tokens, K experts of a token, A rows sent, R rows received, D model.

from __future__ import annotations

from typing import Any, cast

import torch

from trainwright.collectives import Communicator, differentiable
from trainwright.sharding.expert.ranks import ExpertRanks
from trainwright.sharding.expert.rows import move, scale_rows, sum_rows
from trainwright.sharding.expert.trip import Trip


def send_tokens(hidden_ND: torch.Tensor, trip: Trip, ranks: ExpertRanks) -> torch.Tensor:
    """Return the tokens that the ranks of ep have sent here [R, D].

    Communicates:
        One all-to-all over ep; backward one.
    """
    return move(
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
    summed = _ReturnedSum.apply(rows_RD, weights_NK, trip, ranks)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, summed)


class _ReturnedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: torch.Tensor, weights_NK: torch.Tensor, trip: Trip, ranks: ExpertRanks
    ) -> torch.Tensor:
        returned_AD = _exchange(rows_RD, ranks.ep, trip.sent, trip.received)
        ctx.save_for_backward(returned_AD, weights_NK)
        ctx.way = (trip, ranks)
        return sum_rows(returned_AD, trip.choices, weights_NK)

    @staticmethod
    def backward(
        ctx: Any, gradient_ND: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        returned_AD, weights_NK = ctx.saved_tensors
        trip, ranks = ctx.way
        if torch.is_grad_enabled():
            return *_gradients_again(gradient_ND, returned_AD, weights_NK, trip, ranks), None, None
        choices, is_alone = trip.choices, ranks.ep.size == 1
        weights_A = weights_NK.flatten().index_select(0, choices.order)
        num_rows = returned_AD.shape[0]
        # Alone, what is written stays: it is the gradient itself.
        fresh = torch.empty_like(returned_AD) if is_alone else None
        of_AD = ranks.scratch.take(num_rows, returned_AD) if fresh is None else fresh
        dots_A = scale_rows(gradient_ND, returned_AD, weights_A, choices, of_AD)
        of_weights = torch.zeros_like(weights_NK).flatten().index_copy(0, choices.order, dots_A)
        of_rows = _exchange(of_AD, ranks.ep, trip.received, trip.sent)
        return of_rows, of_weights.view_as(weights_NK), None, None


def _gradients_again(
    gradient_ND: torch.Tensor,
    returned_AD: torch.Tensor,
    weights_NK: torch.Tensor,
    trip: Trip,
    ranks: ExpertRanks,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a weighted sum so that they have gradients themselves."""
    choices = trip.choices
    ours_AD = gradient_ND.index_select(0, choices.token)
    weights_A = weights_NK.flatten().index_select(0, choices.order)
    dots_A = (returned_AD * ours_AD).sum(-1)
    of_weights = torch.zeros_like(weights_NK).flatten().index_copy(0, choices.order, dots_A)
    of_rows = differentiable.all_to_all(
        ours_AD * weights_A[:, None], ranks.ep, trip.received, trip.sent
    )
    return of_rows, of_weights.view_as(weights_NK)


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
