"""A linear layer whose three products take quantised operands."""

# Shapes: ... any leading dims, M all of them, I in_features, O out_features.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from trainwright.precision.errors import PrecisionError
from trainwright.precision.formats import BlockQuantized

from . import products
from .bound import BOTH, Float8Products, as_matrix
from .operands import turned
from .protocol import Multipliers
from .roles import Along, Role

Gradients = tuple[torch.Tensor | None, ...]
Saved = tuple[Any, ...]


class Float8Linear(nn.Linear):
    """`torch.nn.Linear` with output, input gradient and weight gradient of quantised operands.

    Parameters, their names, hooks and attributes are those of the layer that it stands for; the
    weight stays in its dtype and is quantised in every forward, so that each sees the weight of
    its time. The bias and its gradient are not quantised. The output has the dtype of the input,
    or autocast's. `convert_linears` makes these.

    NaN and infinity come out as NaN, of all that has their scale. Zeros come out as zeros.

    Args:
        linear: whose parameters, hooks and attributes it shares.
        bound: the products under a recipe, of a `Float8State`.

    Raises:
        PrecisionError: the weight is a part that cannot be scaled as the whole would be.
    """

    float8: Float8Products

    def __init__(self, linear: nn.Linear, bound: Float8Products) -> None:
        bound.check_weight(linear.weight.shape)
        # The same dicts, so that handles of hooks that stand in them still take them off.
        self.__dict__ = {**linear.__dict__, "float8": bound}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``[..., I]`` to ``[..., O]``."""
        if not input.is_floating_point() or input.shape[-1:] != self.weight.shape[1:]:
            raise PrecisionError(
                f"layer {self.float8.name} wants floating-point [..., {self.weight.shape[1]}], "
                f"got {input.dtype} of shape {list(input.shape)}"
            )
        records = self.training and torch.is_grad_enabled()
        return multiply_float8(input, self.weight, self.bias, self.float8, records=records)

    def extra_repr(self) -> str:
        """Say the sizes and the recipe."""
        return f"{super().extra_repr()}, recipe={self.float8.recipe}"


def multiply_float8(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    bound: Float8Products,
    *,
    records: bool,
) -> torch.Tensor:
    """Return ``input @ weight.T + bias`` of quantised operands.

    Args:
        input: ``[..., I]``.
        weight: ``[O, I]``.
        bias: ``[O]`` or None.
        bound: the products under a recipe.
        records: whether magnitudes enter the history, if the recipe has one.

    Raises:
        PrecisionError: a part ends within a block; or in the backward, that the step has ended.

    Communicates:
        What the recipe says, forward for input and weight, backward for the gradient. A forward
        that is run again, to save memory, repeats what its recipe says for a forward.
    """
    kind = input.device.type
    dtype = input.dtype
    if torch.is_autocast_enabled(kind) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    if not torch.is_grad_enabled():
        # Autograd says of a parameter that it needs a gradient even then.
        input, weight = input.detach(), weight.detach()
    args = (input, weight, bias, bound, records, dtype)
    tensors = [given for given in args if isinstance(given, torch.Tensor)]
    # So that a schedule that takes backwards apart sees it, which costs nothing where none is.
    apply: Callable[..., Any] = _Float8Product.apply
    if torch.overrides.has_torch_function(tensors):
        return cast(torch.Tensor, torch.overrides.handle_torch_function(apply, tensors, *args))
    return cast(torch.Tensor, apply(*args))


class _Float8Product(torch.autograd.Function):
    """Keeps the input as codes, and the weight by reference: it may be released meanwhile."""

    weights: ClassVar[tuple[int, ...]] = (1, 2)

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        bound: Float8Products,
        records: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        if needs_weight:
            bound.check_tokens(input.shape)
        matrix_MI = as_matrix(input)
        of_input = bound.measure(matrix_MI, Role.INPUT, _wanted(needs_weight), records)
        of_weight = bound.measure(weight, Role.WEIGHT, _wanted(needs_input), records)
        first = bound.quantize(matrix_MI, Role.INPUT, Along.COLUMNS, of_input)
        second = bound.quantize(weight, Role.WEIGHT, Along.COLUMNS, of_weight)
        out = products.scaled_product(first, second, dtype)
        if bias is not None:
            out += bias.to(dtype)
        kept: BlockQuantized | None = None
        if needs_weight:
            kept = turned(first)
            if not bound.recipe.turns:
                kept = bound.quantize(matrix_MI, Role.INPUT, Along.ROWS, of_input)
        _keep(ctx, weight if needs_input else None, of_weight.get(Along.ROWS), kept)
        ctx.bound, ctx.records, ctx.num_steps = bound, records, bound.num_steps
        ctx.shape, ctx.dtypes = input.shape, (input.dtype, weight.dtype)
        return out.view(*input.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        matrix_MO = as_matrix(gradient)
        of_gradient = _measure_gradient(ctx, matrix_MO)
        first = second = None
        if ctx.needs_input_grad[0]:
            first = _quantize_gradient(ctx, matrix_MO, Along.COLUMNS, of_gradient)
        if ctx.needs_input_grad[1]:
            second = turned(first) if first is not None and ctx.bound.recipe.turns else None
        # Read once: checkpoints recompute what is read, and refuse to do it again.
        saved = ctx.saved_tensors
        given = None if first is None else _input_gradient(ctx, first, saved)
        own = _own_gradients(ctx, matrix_MO, second, saved, of_gradient)
        return given, *own, None, None, None

    @staticmethod
    def input_gradient(ctx: Any, gradient: torch.Tensor) -> Gradients:
        """Return the gradient of the input, and measure that of the output for both."""
        matrix_MO = as_matrix(gradient)
        ctx.of_gradient = _measure_gradient(ctx, matrix_MO)
        given = None
        if ctx.needs_input_grad[0]:
            first = _quantize_gradient(ctx, matrix_MO, Along.COLUMNS, ctx.of_gradient)
            given = _input_gradient(ctx, first, ctx.saved_tensors)
        return given, None, None, None, None, None

    @staticmethod
    def weight_gradient(ctx: Any, gradient: torch.Tensor) -> Gradients:
        """Return the gradients of weight and bias; communicates nothing."""
        return _own_gradients(ctx, as_matrix(gradient), None, ctx.saved_tensors, ctx.of_gradient)


def _wanted(both: bool) -> tuple[Along, ...]:
    return BOTH if both else (Along.COLUMNS,)


def _keep(
    ctx: Any,
    weight: torch.Tensor | None,
    multiplier: torch.Tensor | None,
    kept: BlockQuantized | None,
) -> None:
    tensors = (None, None) if kept is None else (kept.codes, kept.scales)
    ctx.save_for_backward(weight, multiplier, *tensors)
    ctx.kept = None if kept is None else (kept.format, kept.block, kept.scale_format)


def _measure_gradient(ctx: Any, matrix_MO: torch.Tensor) -> Multipliers:
    bound: Float8Products = ctx.bound
    if ctx.records:
        bound.require_step(ctx.num_steps)
    needs_input, needs_weight = ctx.needs_input_grad[:2]
    wanted = [dim for dim, need in zip(BOTH, (needs_input, needs_weight), strict=True) if need]
    if not wanted:
        return {}
    return bound.measure(matrix_MO, Role.GRADIENT, wanted, ctx.records)


def _quantize_gradient(
    ctx: Any, matrix_MO: torch.Tensor, along: Along, of_gradient: Multipliers
) -> BlockQuantized:
    bound: Float8Products = ctx.bound
    return bound.quantize(matrix_MO, Role.GRADIENT, along, of_gradient)


def _input_gradient(ctx: Any, first: BlockQuantized, saved: Saved) -> torch.Tensor:
    weight, multiplier, *_ = saved
    known = {} if multiplier is None else {Along.ROWS: multiplier}
    second = ctx.bound.quantize(weight, Role.WEIGHT, Along.ROWS, known)
    return products.scaled_product(first, second, ctx.dtypes[0]).view(ctx.shape)


def _own_gradients(
    ctx: Any,
    matrix_MO: torch.Tensor,
    first: BlockQuantized | None,
    saved: Saved,
    of_gradient: Multipliers,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of weight and bias; the gradient is quantised unless it is known."""
    of_weight = None
    if ctx.needs_input_grad[1]:
        if first is None:
            first = _quantize_gradient(ctx, matrix_MO, Along.ROWS, of_gradient)
        *_, codes, scales = saved
        kept = BlockQuantized(codes, scales, *ctx.kept)
        of_weight = products.scaled_product(first, kept, ctx.dtypes[1])
    return of_weight, matrix_MO.sum(0) if ctx.needs_input_grad[2] else None
