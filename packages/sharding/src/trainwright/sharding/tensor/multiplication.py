"""How a layer multiplies: plainly, or by products that it was given."""

# Shapes: ... any leading dims, I in_features, O the outputs computed on this rank.

from __future__ import annotations

from typing import Any, ClassVar, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.sharding.errors import NotAvailableError
from trainwright.sharding.protocol import Products

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Input, weight and bias."""


class Multiplication(Protocol):
    """The three products of one forward."""

    def operands(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Operands:
        """Return what is multiplied under autocast."""
        ...

    def output(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``input @ weight.T + bias``."""
        ...

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``gradient @ weight``."""
        ...

    def weight_gradient(self, gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """Return the sum over tokens of ``gradient.T @ input``."""
        ...

    def require_differentiable(self) -> None:
        """Raise where gradients have none themselves."""
        ...


class Plain:
    """PyTorch's products, in the dtypes that autocast asks for."""

    def operands(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Operands:
        """Cast as autocast would for `F.linear`, so that the backward sees what was multiplied."""
        kind = input.device.type
        if not torch.is_autocast_enabled(kind):
            return input, weight, bias
        dtype = torch.get_autocast_dtype(kind)

        def cast_one(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)

        return cast_one(input), cast_one(weight), None if bias is None else cast_one(bias)

    def output(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``input @ weight.T + bias``."""
        return F.linear(input, weight, bias)

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``gradient @ weight``."""
        return gradient @ weight.conj()

    def weight_gradient(self, gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """Return the sum over tokens of ``gradient.T @ input``."""
        rows = to_rows(gradient)
        return rows.t() @ to_rows(input).to(rows.dtype).conj()

    def require_differentiable(self) -> None:
        """Accept: plain products have gradients of any order."""


class Given:
    """The products of one forward, computed by what the layer was given.

    The operands are not cast: what is multiplied is what one rank alone would multiply.

    Args:
        products: What computes them.
        records: Whether the layer is trained.
    """

    def __init__(self, products: Products, records: bool) -> None:
        self._products = products
        self._records = records
        self._kept: dict[str, Any] | None = {} if torch.is_grad_enabled() else None
        self._dtypes = (torch.float32, torch.float32)

    def operands(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Operands:
        """Return them as they are."""
        return input, weight, bias

    def output(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``input @ weight.T + bias`` in the input's dtype, or autocast's."""
        self._dtypes = (input.dtype, weight.dtype)
        kind, dtype = input.device.type, input.dtype
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        out = self._products.output(
            input, weight, dtype=dtype, records=self._records, kept=self._kept
        )
        return out if bias is None else out.add_(bias.to(dtype))

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``gradient @ weight`` in the input's dtype."""
        return self._products.input_gradient(
            gradient, weight, dtype=self._dtypes[0], records=self._records, kept=self._kept
        )

    def weight_gradient(self, gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """Return the sum over tokens of ``gradient.T @ input`` in the weight's dtype."""
        return self._products.weight_gradient(
            gradient, input, dtype=self._dtypes[1], records=self._records, kept=self._kept
        )

    def require_differentiable(self) -> None:
        """Refuse.

        Raises:
            NotAvailableError: Always.
        """
        raise NotAvailableError(
            "second derivatives through a layer with products of its own are not available: call "
            "backward without create_graph, or set the layer's products to None"
        )


PLAIN = Plain()


def multiplication_of(layer: nn.Module, products: Products | None) -> Multiplication:
    """Return how a layer's forward that begins now multiplies.

    Args:
        layer: Whose mode counts.
        products: What the layer was given; None: plain products.
    """
    if products is None:
        return PLAIN
    return Given(products, records=layer.training and torch.is_grad_enabled())


def multiply(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, by: Multiplication
) -> torch.Tensor:
    """Return ``input @ weight.T + bias`` without any communication but that of given products."""
    if isinstance(by, Plain):
        return F.linear(input, weight, bias)
    return apply_function(_Product, input, weight, bias, by)


class _Product(torch.autograd.Function):
    """What `F.linear` does, by given products."""

    weights: ClassVar[tuple[int, ...]] = (1, 2)

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        by: Multiplication,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.by = by
        return by.output(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            ctx.by.require_differentiable()
        input, weight = ctx.saved_tensors
        given = ctx.by.input_gradient(gradient, weight) if ctx.needs_input_grad[0] else None
        return given, *weight_gradients(ctx, gradient, input), None

    @staticmethod
    def input_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the input."""
        _, weight = ctx.saved_tensors
        given = ctx.by.input_gradient(gradient, weight) if ctx.needs_input_grad[0] else None
        return given, None, None, None

    @staticmethod
    def weight_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of weight and bias."""
        return weight_gradients(ctx, gradient, ctx.saved_tensors[0])


def weight_gradients(
    ctx: Any, gradient: torch.Tensor, input: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of weight and bias where they are wanted, of the product's input."""
    of_weight = ctx.by.weight_gradient(gradient, input) if ctx.needs_input_grad[1] else None
    return of_weight, to_rows(gradient).sum(0) if ctx.needs_input_grad[2] else None


def to_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[tokens, features]``."""
    # Not reshape(-1, O): a rank may have no outputs at all.
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor.unsqueeze(0)


def apply_function(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    """Apply it so that a schedule that takes backwards apart sees it."""
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
    if torch.overrides.has_torch_function(tensors):
        # Which costs nothing where none is.
        return cast(
            torch.Tensor, torch.overrides.handle_torch_function(function.apply, tensors, *args)
        )
    return cast(torch.Tensor, function.apply(*args))  # type: ignore[no-untyped-call]
