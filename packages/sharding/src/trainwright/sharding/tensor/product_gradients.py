"""The gradients of products with a part of the outputs, so that they have gradients themselves."""

# Shapes: ... any leading dims, I in_features, O the outputs computed on this rank.

from __future__ import annotations

from typing import Any

import torch

from trainwright.sharding.errors import NotAvailableError
from trainwright.sharding.tensor.multiplication import weight_gradients
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
    ctx.by.require_differentiable()
    given = ctx.by.input_gradient(gradient, weight) if ctx.needs_input_grad[0] else None
    return given, *weight_gradients(ctx, gradient, input)


def finished(pending: Pending | None) -> torch.Tensor | None:
    """Return the result of what was started, if anything was."""
    return None if pending is None else pending.finish()
