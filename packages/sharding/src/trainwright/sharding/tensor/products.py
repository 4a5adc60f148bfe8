"""Products with a part of the outputs, whose communication hides behind the weight gradient.

The backward of such a product owes the sum over the ranks of the input's gradient. It is started
before the weight gradient is computed and waited for after it. Where only this rank's positions of
the input are kept, they are gathered again while the input's gradient is computed.
"""

# Shapes: ... any leading dims, I in_features, O the outputs computed on this rank.

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from trainwright.collectives import Communicator, differentiable
from trainwright.sharding.errors import NotAvailableError
from trainwright.sharding.tensor.pending import (
    Pending,
    start_gather,
    start_sum,
    start_sum_of_parts,
)
from trainwright.sharding.tensor.sequence import (
    Entrance,
    SequenceSharding,
    enter_sequence,
    entrance_of,
    leave_sequence,
)

_Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def multiply_columns(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tp: Communicator,
    sequence: SequenceSharding | None = None,
    *,
    is_entered: bool = False,
) -> torch.Tensor:
    """Return ``input @ weight.T + bias`` where each rank has other rows of the weight.

    Args:
        input: ``[..., I]``: replicated, or this rank's positions of it with ``sequence``.
        weight: ``[O, I]``, what this rank computes.
        bias: ``[O]`` or None.
        tp: The tensor-parallel ranks.
        sequence: How the positions are cut, None where the input is replicated.
        is_entered: The input has been through ``replicate_to_partial`` or `enter_sequence`.

    Communicates:
        Unless entered: backward one all-reduce of the input's gradient, or with ``sequence``
        what `enter_sequence` says. None at size 1.
    """
    if tp.size == 1:
        return F.linear(input, weight, bias)
    tensors = _as_autocast(input, weight, bias)
    if is_entered:
        entrance = entrance_of(input)
        if entrance is None:
            return F.linear(input, weight, bias)
        if weight.requires_grad:
            entrance.regather.users += 1
        return _apply(_EnteredProduct, *tensors, entrance.part, entrance)
    if sequence is None:
        return _apply(_ReplicatedProduct, *tensors, tp)
    return _apply(_GatheredProduct, *tensors, tp, sequence, sequence.length_of(input, tp))


def multiply_rows(
    input: torch.Tensor,
    weight: torch.Tensor,
    tp: Communicator,
    sequence: SequenceSharding | None = None,
) -> torch.Tensor:
    """Return the sum over the ranks of ``input @ weight.T``, or this rank's positions of it.

    Communicates:
        Forward one all-reduce and backward nothing, or with ``sequence`` one reduce-scatter and
        one all-gather. None at size 1.
    """
    terms = F.linear(input, weight)
    if sequence is not None:
        return leave_sequence(terms, tp, sequence)
    if tp.size == 1:
        return terms
    if terms._is_view() or not terms.is_contiguous():
        return differentiable.partial_to_replicate(terms, tp)
    return _apply(_SumInPlace, terms, tp)


class _SumInPlace(torch.autograd.Function):
    """Sums a product that nobody else has seen, so without the copy that keeps the terms."""

    @staticmethod
    def forward(ctx: Any, terms: torch.Tensor, tp: Communicator) -> torch.Tensor:
        ctx.mark_dirty(terms)
        tp.all_reduce(terms).wait()
        return terms

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _ReplicatedProduct(torch.autograd.Function):
    """The input is replicated: its gradient is summed behind the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tp: Communicator,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.tp = tp
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            input = differentiable.replicate_to_partial(input, ctx.tp)
            given, *rest = _differentiable_gradients(ctx, gradient, input, weight)
            total = None if given is None else differentiable.partial_to_replicate(given, ctx.tp)
            return total, *rest, None
        summing = start_sum(gradient @ weight, ctx.tp) if ctx.needs_input_grad[0] else None
        own = _weight_gradients(ctx, gradient, input)
        return _finished(summing), *own, None


class _GatheredProduct(torch.autograd.Function):
    """The input is this rank's positions: gathered, and its gradient summed and cut."""

    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tp: Communicator,
        sequence: SequenceSharding,
        length: int,
    ) -> torch.Tensor:
        whole = start_gather(part, tp, sequence.dim, length).finish()
        ctx.save_for_backward(whole if sequence.keeps_whole else part, weight)
        ctx.tp = tp
        ctx.sequence = sequence
        ctx.length = length
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        sequence: SequenceSharding = ctx.sequence
        if torch.is_grad_enabled():
            return *_gathered_gradients_again(ctx, gradient, kept, weight), None, None, None
        gathering = None
        if ctx.needs_input_grad[1] and not sequence.keeps_whole:
            gathering = start_gather(kept, ctx.tp, sequence.dim, ctx.length)
        summing = None
        if ctx.needs_input_grad[0]:
            summing = start_sum_of_parts(gradient @ weight, ctx.tp, sequence.dim)
        whole = kept if gathering is None else gathering.finish()
        own = _weight_gradients(ctx, gradient, whole)
        return _finished(summing), *own, None, None, None


class _EnteredProduct(torch.autograd.Function):
    """The input has been gathered before, for several products; only the part is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        part: torch.Tensor,
        entrance: Entrance,
    ) -> torch.Tensor:
        ctx.save_for_backward(part, weight)
        ctx.regather = entrance.regather
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        regather = ctx.regather
        if torch.is_grad_enabled():
            sequence = SequenceSharding(regather.dim, True, regather.length)
            whole = enter_sequence(part, regather.comm, sequence)
            return *_differentiable_gradients(ctx, gradient, whole, weight), None, None
        if ctx.needs_input_grad[1]:
            regather.start(part)
        given = gradient @ weight if ctx.needs_input_grad[0] else None
        whole = regather.take() if ctx.needs_input_grad[1] else part
        return given, *_weight_gradients(ctx, gradient, whole), None, None


def _gathered_gradients_again(
    ctx: Any, gradient: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor
) -> _Gradients:
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
    given, *own = _differentiable_gradients(ctx, gradient, whole, weight)
    if given is not None:
        given = leave_sequence(given, ctx.tp, entering)
    return given, own[0], own[1]


def _differentiable_gradients(
    ctx: Any, gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor
) -> _Gradients:
    given = gradient @ weight if ctx.needs_input_grad[0] else None
    return given, *_weight_gradients(ctx, gradient, input)


def _weight_gradients(
    ctx: Any, gradient: torch.Tensor, input: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of weight and bias where they are wanted."""
    rows = _to_rows(gradient)
    of_weight = None
    if ctx.needs_input_grad[1]:
        of_weight = rows.t() @ _to_rows(input).to(rows.dtype)
    return of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def _to_rows(tensor: torch.Tensor) -> torch.Tensor:
    # Not reshape(-1, O): a rank may have no outputs at all.
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor.unsqueeze(0)


def _finished(pending: Pending | None) -> torch.Tensor | None:
    return None if pending is None else pending.finish()


def _as_autocast(
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


def _apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    return cast(torch.Tensor, function.apply(*args))  # type: ignore[no-untyped-call]
