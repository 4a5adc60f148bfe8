"""Moves of rows within a rank: sums over a token's choices are in order, never in atomics."""

# Shapes: N tokens, K experts of a token, A rows sent of the N * K, R rows received, D model.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import attrs
import torch
import torch.nn.functional as F

_CACHED_ELEMENTS = 1 << 17

Move = Callable[[torch.Tensor], torch.Tensor]


@attrs.frozen(eq=False)
class Choices:
    """Which of a rank's N * K choices are sent, and where they lie among the rows sent.

    Args:
        num_tokens: N.
        order: int64 [A], the choices in the order of the rows.
        token: int64 [A], the token of each row.
        row: int64 [A], the rows in the order of the choices.
        starts: int64 [N], where the rows of each token begin in ``row``.
    """

    num_tokens: int
    order: torch.Tensor
    token: torch.Tensor
    row: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, order: torch.Tensor, num_tokens: int, top_k: int) -> Choices:
        """Return those of the rows in an order.

        Args:
            order: int64 [A], each choice at most once.
            num_tokens: N.
            top_k: K.
        """
        in_order, row = order.sort()
        first = torch.arange(num_tokens, device=order.device) * top_k
        token = order.div(top_k, rounding_mode="floor")
        return cls(num_tokens, order, token, row, torch.searchsorted(in_order, first))


def take_tokens(hidden_ND: torch.Tensor, choices: Choices) -> torch.Tensor:
    """Return the rows to send [A, D]."""
    return _move(hidden_ND, partial(_take, choices=choices), partial(_add, choices=choices))


def sum_choices(rows_AD: torch.Tensor, weights_NK: torch.Tensor, choices: Choices) -> torch.Tensor:
    """Return each token's weighted sum of its rows [N, D]; zero where nothing was sent."""
    weights_NK = weights_NK.to(rows_AD.dtype)
    if not torch.is_grad_enabled():
        return _weighted_sum(rows_AD, weights_NK, choices)
    summed = _WeightedSum.apply(rows_AD, weights_NK, choices)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, summed)


def permute(rows_RD: torch.Tensor, order_R: torch.Tensor, inverse_R: torch.Tensor) -> torch.Tensor:
    """Return the rows in another order: row i is row ``order[i]``."""
    there = partial(torch.Tensor.index_select, dim=0, index=order_R)
    back = partial(torch.Tensor.index_select, dim=0, index=inverse_R)
    return _move(rows_RD, there, back)


def _take(hidden_ND: torch.Tensor, choices: Choices) -> torch.Tensor:
    return hidden_ND.index_select(0, choices.token)


def _add(rows_AD: torch.Tensor, choices: Choices) -> torch.Tensor:
    return F.embedding_bag(choices.row, rows_AD, choices.starts, mode="sum")


def _weighted_sum(
    rows_AD: torch.Tensor, weights_NK: torch.Tensor, choices: Choices
) -> torch.Tensor:
    weights_A = weights_NK.flatten().index_select(0, choices.order.index_select(0, choices.row))
    return F.embedding_bag(
        choices.row, rows_AD, choices.starts, mode="sum", per_sample_weights=weights_A
    )


def _scaled_and_dots(
    gradient_ND: torch.Tensor,
    rows_AD: torch.Tensor,
    weights_A: torch.Tensor,
    token_A: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's gradient, and the gradient of its weight, in one walk over the rows."""
    of_rows, dots_A = torch.empty_like(rows_AD), torch.empty_like(weights_A)
    step = max(1, rows_AD.shape[0])
    if rows_AD.device.type == "cpu":
        step = max(1, _CACHED_ELEMENTS // max(1, rows_AD.shape[1]))
    for start in range(0, rows_AD.shape[0], step):
        here = slice(start, start + step)
        ours = of_rows[here]
        torch.index_select(gradient_ND, 0, token_A[here], out=ours)
        torch.sum(rows_AD[here] * ours, -1, out=dots_A[here])
        ours.mul_(weights_A[here, None])
    return of_rows, dots_A


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_AD: torch.Tensor, weights_NK: torch.Tensor, choices: Choices
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_AD, weights_NK)
        ctx.choices = choices
        return _weighted_sum(rows_AD, weights_NK, choices)

    @staticmethod
    def backward(ctx: Any, gradient_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows_AD, weights_NK = ctx.saved_tensors
        choices: Choices = ctx.choices
        weights_A = weights_NK.flatten().index_select(0, choices.order)
        if torch.is_grad_enabled():
            ours_AD = take_tokens(gradient_ND, choices)
            of_rows, dots_A = ours_AD * weights_A[:, None], (rows_AD * ours_AD).sum(-1)
        else:
            of_rows, dots_A = _scaled_and_dots(gradient_ND, rows_AD, weights_A, choices.token)
        of_weights = torch.zeros_like(weights_NK).flatten().index_copy(0, choices.order, dots_A)
        return of_rows, of_weights.view_as(weights_NK), None


def _move(tensor: torch.Tensor, forth: Move, back: Move) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return forth(tensor)
    return cast(torch.Tensor, _Move.apply(tensor, forth, back))  # type: ignore[no-untyped-call]


class _Move(torch.autograd.Function):
    """A linear map and its adjoint, each the other's backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forth: Move, back: Move) -> torch.Tensor:
        ctx.moves = (forth, back)
        return forth(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        forth, back = ctx.moves
        return _move(gradient, back, forth), None, None
