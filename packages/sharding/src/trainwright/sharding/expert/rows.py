"""Moves of rows within a rank: sums over a token's choices are in order, never in atomics."""

# Shapes: N tokens, K experts of a token, A rows sent of the N * K, R rows received, D model.

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F

from trainwright.collectives.linear_maps import apply_linear

_CACHED_ELEMENTS = 1 << 17


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


def permute(rows_RD: torch.Tensor, order_R: torch.Tensor, inverse_R: torch.Tensor) -> torch.Tensor:
    """Return the rows in another order: row i is row ``order[i]``."""
    return apply_linear(
        rows_RD,
        lambda rows: rows.index_select(0, order_R),
        lambda rows: rows.index_select(0, inverse_R),
    )


def sum_rows(
    rows_AD: torch.Tensor, choices: Choices, weights_NK: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each token's sum of its rows [N, D], without a gradient; zero where it has none.

    Args:
        rows_AD: A row for each choice that is sent.
        choices: Where they lie.
        weights_NK: Factors of the rows; None adds them as they are.
    """
    weights_A = None
    if weights_NK is not None:
        weights_A = weights_NK.flatten()[choices.order.index_select(0, choices.row)]
    return F.embedding_bag(
        choices.row, rows_AD, choices.starts, mode="sum", per_sample_weights=weights_A
    )


def scale_rows(
    gradient_ND: torch.Tensor,
    rows_AD: torch.Tensor,
    weights_A: torch.Tensor,
    choices: Choices,
    out_AD: torch.Tensor,
) -> torch.Tensor:
    """Write the gradients of the rows of a weighted sum, and return those of the weights [A].

    One walk over the rows, in pieces that stay in the cache.

    Args:
        gradient_ND: Of the sums.
        rows_AD: What was summed.
        weights_A: Their factors.
        choices: Where the rows lie.
        out_AD: Gets the gradients of the rows.
    """
    dots_A = torch.empty_like(weights_A)
    step = max(1, rows_AD.shape[0])
    if rows_AD.device.type == "cpu":
        step = max(1, _CACHED_ELEMENTS // max(1, rows_AD.shape[1]))
    for start in range(0, rows_AD.shape[0], step):
        here = slice(start, start + step)
        ours = out_AD[here]
        torch.index_select(gradient_ND, 0, choices.token[here], out=ours)
        torch.sum(rows_AD[here] * ours, -1, out=dots_A[here])
        ours.mul_(weights_A[here, None])
    return dots_A
