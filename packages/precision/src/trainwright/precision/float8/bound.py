"""A recipe bound to the three matrices of one layer, and the products of its parallel kind."""

# Shapes: ... any leading dims, M all of them, I in_features, O out_features.

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs
import torch

from trainwright.precision.formats import BlockQuantized

from . import products
from .memory import AmaxMemory
from .protocol import Binding, Multipliers, Recipe
from .roles import Along, Role, Scope

BOTH = (Along.COLUMNS, Along.ROWS)


@attrs.frozen(eq=False)
class Float8Products:
    """The three products of one layer under a recipe; made by `Float8State`.

    A copy of a layer, such as an average of weights, shares these, and so the scales.

    Args:
        name: of the layer.
        recipe: how its operands are scaled.
        scope: over which ranks it is cut.
        memories: of its matrices, where the recipe wants them.
    """

    name: str
    recipe: Recipe
    scope: Scope
    memories: Mapping[Role, AmaxMemory] = attrs.field(factory=dict, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Products:
        """Return itself: ranks and memories are not to be had twice."""
        return self

    @property
    def num_steps(self) -> int:
        """Steps ended so far, as far as memories know."""
        return self.memories[Role.INPUT].num_steps if self.memories else 0

    def binding(self, role: Role) -> Binding:
        """Return what the matrix in this role is."""
        return Binding(self.name, role, self.scope.cut(role), self.memories.get(role))

    def check_weight(self, shape: torch.Size) -> None:
        """Refuse a part of a weight that cannot be scaled as the whole would be.

        Raises:
            PrecisionError: it ends within a block.
        """
        self.recipe.check(self.binding(Role.WEIGHT), shape, BOTH)

    def measure(
        self, matrix: torch.Tensor, role: Role, wanted: Collection[Along], records: bool
    ) -> Multipliers:
        """Return what has to be known before the matrix is encoded; see `Recipe.measure`."""
        return self.recipe.measure(matrix.detach(), self.binding(role), wanted, records)

    def quantize(
        self, matrix: torch.Tensor, role: Role, along: Along, multipliers: Multipliers
    ) -> BlockQuantized:
        """Return an operand; see `Recipe.quantize`."""
        return self.recipe.quantize(matrix.detach(), role, along, multipliers)

    def operand(
        self, matrix: torch.Tensor, role: Role, along: Along, records: bool
    ) -> BlockQuantized:
        """Measure and quantise a matrix along one dim."""
        return self.quantize(matrix, role, along, self.measure(matrix, role, (along,), records))

    def output(self, input: torch.Tensor, weight: torch.Tensor, *, records: bool) -> torch.Tensor:
        """Return ``input @ weight.T`` of quantised operands: ``[..., O]``, in the input's dtype.

        These three are for layers with an autograd function of their own, in place of their plain
        products. Matrices are measured anew in each.

        Args:
            input: ``[..., I]``.
            weight: ``[O, I]``.
            records: whether the layer is trained: in ``train`` and with gradients enabled.
        """
        first = self.operand(as_matrix(input), Role.INPUT, Along.COLUMNS, records)
        second = self.operand(weight, Role.WEIGHT, Along.COLUMNS, records)
        out = products.scaled_product(first, second, input.dtype)
        return out.view(*input.shape[:-1], weight.shape[0])

    def input_gradient(
        self, gradient: torch.Tensor, weight: torch.Tensor, *, records: bool
    ) -> torch.Tensor:
        """Return ``gradient @ weight`` of quantised operands: ``[..., I]``."""
        first = self.operand(as_matrix(gradient), Role.GRADIENT, Along.COLUMNS, records)
        second = self.operand(weight, Role.WEIGHT, Along.ROWS, False)
        out = products.scaled_product(first, second, gradient.dtype)
        return out.view(*gradient.shape[:-1], weight.shape[1])

    def weight_gradient(
        self, gradient: torch.Tensor, input: torch.Tensor, *, records: bool
    ) -> torch.Tensor:
        """Return the sum over tokens of ``gradient.T @ input``, of quantised operands: [O, I]."""
        first = self.operand(as_matrix(gradient), Role.GRADIENT, Along.ROWS, records)
        second = self.operand(as_matrix(input), Role.INPUT, Along.ROWS, False)
        return products.scaled_product(first, second, gradient.dtype)


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[M, features]``, also where there are no features."""
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor.unsqueeze(0)
