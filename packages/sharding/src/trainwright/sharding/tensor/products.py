"""Products with a part of the outputs, whose communication hides behind the weight gradient.

The backward of such a product owes the sum over the ranks of the input's gradient. It is started
before the weight gradient is computed and waited for after it. Where only this rank's positions of
the input are kept, they are gathered again while the input's gradient is computed.

Where a schedule takes backwards apart, it calls ``input_gradient`` and, at any later time,
``weight_gradient`` in place of ``backward``. The sum is then waited for before the weight gradient.
"""

# Shapes: ... any leading dims, I in_features, O the outputs computed on this rank.

from __future__ import annotations

from typing import Any, ClassVar

import torch

from trainwright.collectives import Communicator, differentiable
from trainwright.sharding.tensor.multiplication import (
    PLAIN,
    Multiplication,
    apply_function,
    multiply,
    weight_gradients,
)
from trainwright.sharding.tensor.pending import start_gather, start_sum, start_sum_of_parts
from trainwright.sharding.tensor.product_gradients import (
    differentiable_gradients,
    finished,
    gathered_gradients_again,
)
from trainwright.sharding.tensor.sequence import (
    Entrance,
    SequenceSharding,
    enter_sequence,
    entrance_of,
    leave_sequence,
)


def multiply_columns(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tp: Communicator,
    sequence: SequenceSharding | None = None,
    *,
    is_entered: bool = False,
    by: Multiplication = PLAIN,
) -> torch.Tensor:
    """Return ``input @ weight.T + bias`` where each rank has other rows of the weight.

    Args:
        input: ``[..., I]``: replicated, or this rank's positions of it with ``sequence``.
        weight: ``[O, I]``, what this rank computes.
        bias: ``[O]`` or None.
        tp: The tensor-parallel ranks.
        sequence: How the positions are cut, None where the input is replicated.
        is_entered: The input has been through ``replicate_to_partial`` or `enter_sequence`.
        by: How this forward multiplies.

    Communicates:
        Unless entered: backward one all-reduce of the input's gradient, or with ``sequence``
        what `enter_sequence` says. None at size 1.
    """
    if tp.size == 1:
        return multiply(input, weight, bias, by)
    tensors = by.operands(input, weight, bias)
    if is_entered:
        entrance = entrance_of(input)
        if entrance is None:
            return multiply(input, weight, bias, by)
        if weight.requires_grad:
            entrance.regather.users += 1
        return apply_function(_EnteredProduct, *tensors, by, entrance.part, entrance)
    if sequence is None:
        return apply_function(_ReplicatedProduct, *tensors, by, tp)
    length = sequence.length_of(input, tp)
    return apply_function(_GatheredProduct, *tensors, by, tp, sequence, length)


def multiply_rows(
    input: torch.Tensor,
    weight: torch.Tensor,
    tp: Communicator,
    sequence: SequenceSharding | None = None,
    by: Multiplication = PLAIN,
) -> torch.Tensor:
    """Return the sum over the ranks of ``input @ weight.T``, or this rank's positions of it.

    Communicates:
        Forward one all-reduce and backward nothing, or with ``sequence`` one reduce-scatter and
        one all-gather. None at size 1.
    """
    terms = multiply(input, weight, None, by)
    if sequence is not None:
        return leave_sequence(terms, tp, sequence)
    if tp.size == 1:
        return terms
    if terms._is_view() or not terms.is_contiguous():
        return differentiable.partial_to_replicate(terms, tp)
    return apply_function(_SumInPlace, terms, tp)


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

    weights: ClassVar[tuple[int, ...]] = (1, 2)

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        by: Multiplication,
        tp: Communicator,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.by = by
        ctx.tp = tp
        return by.output(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            input = differentiable.replicate_to_partial(input, ctx.tp)
            given, *rest = differentiable_gradients(ctx, gradient, input, weight)
            total = None if given is None else differentiable.partial_to_replicate(given, ctx.tp)
            return total, *rest, None, None
        summing = None
        if ctx.needs_input_grad[0]:
            summing = start_sum(ctx.by.input_gradient(gradient, weight), ctx.tp)
        own = weight_gradients(ctx, gradient, input)
        return finished(summing), *own, None, None

    @staticmethod
    def input_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the input; one all-reduce."""
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        _, weight = ctx.saved_tensors
        terms = ctx.by.input_gradient(gradient, weight)
        return start_sum(terms, ctx.tp).finish(), None, None, None, None

    @staticmethod
    def weight_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of weight and bias."""
        return weight_gradients(ctx, gradient, ctx.saved_tensors[0])


class _GatheredProduct(torch.autograd.Function):
    """The input is this rank's positions: gathered, and its gradient summed and cut."""

    weights: ClassVar[tuple[int, ...]] = (1, 2)

    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        by: Multiplication,
        tp: Communicator,
        sequence: SequenceSharding,
        length: int,
    ) -> torch.Tensor:
        whole = start_gather(part, tp, sequence.dim, length).finish()
        ctx.save_for_backward(whole if sequence.keeps_whole else part, weight)
        ctx.by = by
        ctx.tp = tp
        ctx.sequence = sequence
        ctx.length = length
        return by.output(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        sequence: SequenceSharding = ctx.sequence
        if torch.is_grad_enabled():
            return *gathered_gradients_again(ctx, gradient, kept, weight), None, None, None, None
        gathering = None
        if ctx.needs_input_grad[1] and not sequence.keeps_whole:
            gathering = start_gather(kept, ctx.tp, sequence.dim, ctx.length)
        summing = None
        if ctx.needs_input_grad[0]:
            terms = ctx.by.input_gradient(gradient, weight)
            summing = start_sum_of_parts(terms, ctx.tp, sequence.dim)
        whole = kept if gathering is None else gathering.finish()
        own = weight_gradients(ctx, gradient, whole)
        return finished(summing), *own, None, None, None, None

    @staticmethod
    def input_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of this rank's positions; one reduce-scatter."""
        given = None
        if ctx.needs_input_grad[0]:
            _, weight = ctx.saved_tensors
            terms = ctx.by.input_gradient(gradient, weight)
            given = start_sum_of_parts(terms, ctx.tp, ctx.sequence.dim).finish()
        return given, None, None, None, None, None, None

    @staticmethod
    def weight_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of weight and bias; one all-gather where a part is kept."""
        whole = ctx.saved_tensors[0]
        if ctx.needs_input_grad[1] and not ctx.sequence.keeps_whole:
            whole = start_gather(whole, ctx.tp, ctx.sequence.dim, ctx.length).finish()
        return weight_gradients(ctx, gradient, whole)


class _EnteredProduct(torch.autograd.Function):
    """The input has been gathered before, for several products; only the part is kept."""

    weights: ClassVar[tuple[int, ...]] = (1, 2)

    @staticmethod
    def forward(
        ctx: Any,
        whole: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        by: Multiplication,
        part: torch.Tensor,
        entrance: Entrance,
    ) -> torch.Tensor:
        ctx.save_for_backward(part, weight)
        ctx.by = by
        ctx.regather = entrance.regather
        return by.output(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        regather = ctx.regather
        if torch.is_grad_enabled():
            sequence = SequenceSharding(regather.dim, True, regather.length)
            whole = enter_sequence(part, regather.comm, sequence)
            return *differentiable_gradients(ctx, gradient, whole, weight), None, None, None
        if ctx.needs_input_grad[1]:
            regather.start(part)
        given = ctx.by.input_gradient(gradient, weight) if ctx.needs_input_grad[0] else None
        whole = regather.take() if ctx.needs_input_grad[1] else part
        return given, *weight_gradients(ctx, gradient, whole), None, None, None

    @staticmethod
    def input_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of what was gathered."""
        _, weight = ctx.saved_tensors
        given = ctx.by.input_gradient(gradient, weight) if ctx.needs_input_grad[0] else None
        return given, None, None, None, None, None

    @staticmethod
    def weight_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of weight and bias; one all-gather for all products of a part."""
        part = ctx.saved_tensors[0]
        if ctx.needs_input_grad[1]:
            ctx.regather.start(part)
            part = ctx.regather.take()
        return weight_gradients(ctx, gradient, part)
