"""Moves of rows within a rank, each with its adjoint as backward: no sums in unordered atomics."""

# Shapes: N tokens, K experts of a token, A rows sent of the N * K, R rows received, D model.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

Move = Callable[[torch.Tensor], torch.Tensor]


def take_tokens(hidden_ND: torch.Tensor, order_A: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the rows to send [A, D]: token ``order // K`` for each.

    Args:
        hidden_ND: This rank's tokens.
        order_A: Which of the N * K choices is sent, each at most once.
        top_k: K.
    """
    num_tokens = hidden_ND.shape[0]
    token_A = order_A.div(top_k, rounding_mode="floor")
    take = partial(torch.Tensor.index_select, dim=0, index=token_A)
    add = partial(_sum_choices, order_A=order_A, num_tokens=num_tokens, top_k=top_k)
    return _move(hidden_ND, take, add)


def place_choices(
    rows_AD: torch.Tensor, order_A: torch.Tensor, num_tokens: int, top_k: int
) -> torch.Tensor:
    """Return what came back by token and choice [N, K, D], zero where nothing was sent."""
    put = partial(_place, order_A=order_A, num_tokens=num_tokens, top_k=top_k)
    return _move(rows_AD, put, partial(_take_choices, order_A=order_A))


def permute(rows_RD: torch.Tensor, order_R: torch.Tensor, inverse_R: torch.Tensor) -> torch.Tensor:
    """Return the rows in another order: row i is row ``order[i]``."""
    there = partial(torch.Tensor.index_select, dim=0, index=order_R)
    back = partial(torch.Tensor.index_select, dim=0, index=inverse_R)
    return _move(rows_RD, there, back)


def _place(
    rows_AD: torch.Tensor, order_A: torch.Tensor, num_tokens: int, top_k: int
) -> torch.Tensor:
    shape = (num_tokens * top_k, *rows_AD.shape[1:])
    is_full = shape[0] == order_A.shape[0]
    placed = rows_AD.new_empty(shape) if is_full else rows_AD.new_zeros(shape)
    return placed.index_copy_(0, order_A, rows_AD).view(num_tokens, top_k, *rows_AD.shape[1:])


def _take_choices(choices_NKD: torch.Tensor, order_A: torch.Tensor) -> torch.Tensor:
    return choices_NKD.flatten(0, 1).index_select(0, order_A)


def _sum_choices(
    rows_AD: torch.Tensor, order_A: torch.Tensor, num_tokens: int, top_k: int
) -> torch.Tensor:
    return _place(rows_AD, order_A, num_tokens, top_k).sum(1)


def _move(tensor: torch.Tensor, forth: Move, back: Move) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return forth(tensor)
    return cast(torch.Tensor, _Move.apply(tensor, forth, back))  # type: ignore[no-untyped-call]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forth: Move, back: Move) -> torch.Tensor:
        ctx.moves = (forth, back)
        return forth(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        forth, back = ctx.moves
        return _move(gradient, back, forth), None, None
