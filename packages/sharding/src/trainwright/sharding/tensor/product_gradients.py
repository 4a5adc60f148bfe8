"""The gradients of products with a part of the outputs, and the dtypes that autocast asks for."""

# Shapes: ... any leading dims, I in_features, O the outputs computed on this rank.

from __future__ import annotations

from typing import Any

import torch

from trainwright.sharding.errors import NotAvailableError
from trainwright.sharding.tensor.pending import Pending
from trainwright.sharding.tensor.sequence import SequenceSharding, enter_sequence, leave_sequence

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of input, weight and bias."""


def gathered_gradients_again(
    ctx: Any, gradient: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor
) -> Gradients:
    """Compute the gradients of `_GatheredProduct` so that they have gradients themselves."""
    sequence: SequenceSharding = ctx.sequence
    if sequence.keeps_whole:
        # What was kept has no history: its second derivative would be zero without a word.
        raise NotAvailableError(
            "second derivatives through a gathered input that is kept whole are not available; "
            "keep parts instead: SequenceSharding.keeping_shards()"
        )
    entering = SequenceSharding(sequence.dim, True, ctx.length)
    whole = enter_sequence(kept, ctx.tp, entering)
    given, *own = differentiable_gradients(ctx, gradient, whole, weight)
    if given is not None:
        given = leave_sequence(given, ctx.tp, entering)
    return given, own[0], own[1]


def differentiable_gradients(
    ctx: Any, gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor
) -> Gradients:
    """Return all gradients of a product, so that they have gradients themselves."""
    given = gradient @ weight.conj() if ctx.needs_input_grad[0] else None
    return given, *weight_gradients(ctx, gradient, input)


def weight_gradients(
    ctx: Any, gradient: torch.Tensor, input: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of weight and bias where they are wanted, of the product's input."""
    rows = _to_rows(gradient)
    of_weight = None
    if ctx.needs_input_grad[1]:
        of_weight = rows.t() @ _to_rows(input).to(rows.dtype).conj()
    return of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def _to_rows(tensor: torch.Tensor) -> torch.Tensor:
    # Not reshape(-1, O): a rank may have no outputs at all.
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor.unsqueeze(0)


def finished(pending: Pending | None) -> torch.Tensor | None:
    """Return the result of what was started, if anything was."""
    return None if pending is None else pending.finish()


def as_autocast(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cast as autocast would cast for `F.linear`, so that the backward sees what was multiplied."""
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return input, weight, bias
    dtype = torch.get_autocast_dtype(kind)

    def cast_one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)

    return cast_one(input), cast_one(weight), None if bias is None else cast_one(bias)
