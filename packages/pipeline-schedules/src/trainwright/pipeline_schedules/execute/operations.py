"""PyTorch's products with a weight, as operations whose backward comes in two parts."""

# Shapes: ... any leading dims, I in_features, O out_features; rows are the leading dims in one.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch
import torch.nn.functional as F

from trainwright.pipeline_schedules.execute.protocol import Gradients

_Arguments = tuple[Any, ...]


@attrs.frozen(eq=False)
class BuiltIn:
    """A function of PyTorch's, what stands for it, and how its arguments are read.

    ``bind`` takes the function's arguments and gives those of the operation; it raises a
    `TypeError` where they are more than the operation can do.
    """

    operation: Any
    bind: Callable[..., _Arguments]


class Linear:
    """``input @ weight.T + bias``, as `torch.nn.functional.linear`."""

    weights: ClassVar[tuple[int, ...]] = (1, 2)

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Map ``[..., I]`` to ``[..., O]``."""
        ctx.save_for_backward(input, weight)
        return own_memory(F.linear(input, weight, bias))

    @staticmethod
    def input_gradient(ctx: Any, gradient: torch.Tensor) -> Gradients:
        """The gradient of the input."""
        if not ctx.needs_input_grad[0]:
            return (None, None, None)
        input, weight = ctx.saved_tensors
        return (_rows(gradient).mm(weight.conj()).view(input.shape), None, None)

    @staticmethod
    def weight_gradient(ctx: Any, gradient: torch.Tensor) -> Gradients:
        """The gradients of weight and bias."""
        rows = _rows(gradient)
        of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_weight = rows.t().mm(_rows(ctx.saved_tensors[0]).conj())
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return (of_weight, of_bias)


class Product:
    """``input @ weight``, a matrix of ``[I, O]``, as `torch.matmul`."""

    weights: ClassVar[tuple[int, ...]] = (1,)

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Map ``[..., I]`` to ``[..., O]``."""
        ctx.save_for_backward(input, weight)
        return own_memory(torch.matmul(input, weight))

    @staticmethod
    def input_gradient(ctx: Any, gradient: torch.Tensor) -> Gradients:
        """The gradient of the input."""
        if not ctx.needs_input_grad[0]:
            return (None, None)
        input, weight = ctx.saved_tensors
        return (_rows(gradient).mm(weight.t().conj()).view(input.shape), None)

    @staticmethod
    def weight_gradient(ctx: Any, gradient: torch.Tensor) -> Gradients:
        """The gradient of the weight."""
        return (_rows(ctx.saved_tensors[0]).t().conj().mm(_rows(gradient)),)


class BiasedProduct:
    """``bias + input @ weight``, of matrices, as `torch.addmm` without factors."""

    weights: ClassVar[tuple[int, ...]] = (0, 2)

    @staticmethod
    def forward(
        ctx: Any, bias: torch.Tensor, input: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Map ``[rows, I]`` to ``[rows, O]``."""
        ctx.save_for_backward(input, weight)
        return torch.addmm(bias, input, weight)

    @staticmethod
    def input_gradient(ctx: Any, gradient: torch.Tensor) -> Gradients:
        """The gradient of the input."""
        of_input = None
        if ctx.needs_input_grad[1]:
            of_input = gradient.mm(ctx.saved_tensors[1].t().conj())
        return (None, of_input, None)

    @staticmethod
    def weight_gradient(ctx: Any, gradient: torch.Tensor) -> Gradients:
        """The gradients of bias and weight."""
        of_bias = of_weight = None
        if ctx.needs_input_grad[0]:
            of_bias = gradient.sum(0)
        if ctx.needs_input_grad[2]:
            of_weight = ctx.saved_tensors[0].t().conj().mm(gradient)
        return (of_bias, of_weight)


def own_memory(output: torch.Tensor) -> torch.Tensor:
    """The output as no view, so that what follows may change it in place."""
    if output._is_view():
        return torch.ops.aten._unsafe_view.default(output, output.shape)  # type: ignore[no-any-return]
    return output


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    # Not reshape(-1, O): there may be no outputs at all.
    if tensor.ndim == 2:
        return tensor
    return tensor.flatten(0, -2) if tensor.ndim > 2 else tensor.unsqueeze(0)


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> _Arguments:
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise TypeError("not rows times a matrix and a bias for each output")
    return _as_autocast(input, weight, bias)


def _matmul(input: torch.Tensor, other: torch.Tensor) -> _Arguments:
    if input.ndim < 2 or other.ndim != 2:
        raise TypeError("not rows times a matrix")
    return _as_autocast(input, other)


def _mm(input: torch.Tensor, mat2: torch.Tensor) -> _Arguments:
    return _as_autocast(input, mat2)


def _addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> _Arguments:
    if input.shape != mat2.shape[1:]:
        raise TypeError("no bias")
    return _as_autocast(input, mat1, mat2)


def _as_autocast(*tensors: torch.Tensor | None) -> _Arguments:
    """Cast as autocast casts for these products; gradients go through the cast of a weight."""
    first = tensors[0]
    assert first is not None
    kind = first.device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype)
        for t in tensors
    )


BUILT_IN: Mapping[Any, BuiltIn] = {
    F.linear: BuiltIn(Linear, _linear),
    torch.matmul: BuiltIn(Product, _matmul),
    torch.Tensor.matmul: BuiltIn(Product, _matmul),
    torch.mm: BuiltIn(Product, _mm),
    torch.Tensor.mm: BuiltIn(Product, _mm),
    torch.addmm: BuiltIn(BiasedProduct, _addmm),
    torch.Tensor.addmm: BuiltIn(BiasedProduct, _addmm),
}
"""The functions that are taken apart without asking anybody."""
