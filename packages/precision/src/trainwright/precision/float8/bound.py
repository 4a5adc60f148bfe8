"""A recipe bound to the three matrices of one layer, and the products of its parallel kind."""

# Shapes: ... any leading dims, M all of them, I in_features, O out_features.

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import torch

from trainwright.precision.errors import PrecisionError
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

    def check_weight(self, shape: Sequence[int]) -> None:
        """Refuse a part of a weight that cannot be scaled as the whole would be.

        Raises:
            PrecisionError: it ends within a block.
        """
        self.recipe.check(self.binding(Role.WEIGHT), torch.Size(shape), BOTH)

    def check_tokens(self, shape: torch.Size) -> None:
        """Refuse an input whose weight gradient would have other blocks than on one rank.

        Args:
            shape: of the input, [..., I].

        Raises:
            PrecisionError: a run of tokens ends within a block.
        """
        run = torch.Size((self.scope.run_of(shape), *shape[-1:]))
        self.recipe.check(self.binding(Role.INPUT), run, (Along.ROWS,))

    def require_step(self, num_steps: int) -> None:
        """Refuse a backward in another step than its forward's.

        Raises:
            PrecisionError: steps have ended since there were ``num_steps``.
        """
        if num_steps != self.num_steps:
            raise PrecisionError(
                f"the backward of layer {self.name} runs after end_step, so that its magnitudes "
                f"would count for another step and its scale is another: end the step after the "
                f"last backward"
            )

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

    def output(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        records: bool,
        kept: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Return ``input @ weight.T`` of quantised operands: ``[..., O]``.

        These three are for layers with an autograd function of their own, in place of their plain
        products.

        Args:
            input: ``[..., I]``.
            weight: ``[O, I]``.
            dtype: of the result; None: the input's.
            records: whether the layer is trained: in ``train`` and with gradients enabled.
            kept: one dict for the three products of a forward, where measurements are left for the
                later ones; None: there is no backward, or matrices are measured anew.

        Raises:
            PrecisionError: a part ends within a block.

        Communicates:
            What the recipe says for input and weight.
        """
        matrix_MI = as_matrix(input)
        if kept is not None:
            if weight.requires_grad:
                self.check_tokens(input.shape)
            kept["num_steps"] = self.num_steps
        first = self._operand(matrix_MI, Role.INPUT, Along.COLUMNS, records, kept)
        second = self._operand(weight, Role.WEIGHT, Along.COLUMNS, records, kept)
        out = products.scaled_product(first, second, dtype or input.dtype)
        return out.view(*input.shape[:-1], weight.shape[0])

    def input_gradient(
        self,
        gradient: torch.Tensor,
        weight: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        records: bool,
        kept: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Return ``gradient @ weight`` of quantised operands: ``[..., I]``.

        Raises:
            PrecisionError: the step of the forward has ended.

        Communicates:
            What the recipe says for the gradient, and for the weight along its other dim.
        """
        first = self._gradient(gradient, Along.COLUMNS, records, kept)
        second = self._operand(weight, Role.WEIGHT, Along.ROWS, False, kept)
        out = products.scaled_product(first, second, dtype or gradient.dtype)
        return out.view(*gradient.shape[:-1], weight.shape[1])

    def weight_gradient(
        self,
        gradient: torch.Tensor,
        input: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        records: bool,
        kept: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Return the sum over tokens of ``gradient.T @ input``, of quantised operands: [O, I].

        Raises:
            PrecisionError: the step of the forward has ended.

        Communicates:
            What the recipe says for gradient and input, as far as it was not kept.
        """
        first = self._gradient(gradient, Along.ROWS, records, kept)
        second = self._operand(as_matrix(input), Role.INPUT, Along.ROWS, False, kept)
        return products.scaled_product(first, second, dtype or gradient.dtype)

    def _operand(
        self,
        matrix: torch.Tensor,
        role: Role,
        along: Along,
        records: bool,
        kept: dict[str, Any] | None,
    ) -> BlockQuantized:
        """Quantise what is the same in forward and backward, measured once where that serves."""
        if kept is None or not self.recipe.turns:
            return self.operand(matrix, role, along, records)
        if role.value not in kept:
            kept[role.value] = self.measure(matrix, role, BOTH, records)
        return self.quantize(matrix, role, along, kept[role.value])

    def _gradient(
        self, gradient: torch.Tensor, along: Along, records: bool, kept: dict[str, Any] | None
    ) -> BlockQuantized:
        """Quantise a gradient, measured once for both products of one backward."""
        matrix_MO = as_matrix(gradient)
        if kept is not None and records:
            self.require_step(kept["num_steps"])
        if kept is None or not self.recipe.turns:
            return self.operand(matrix_MO, Role.GRADIENT, along, records)
        measured = kept.get(Role.GRADIENT.value)
        # Of this very tensor: another backward through the same forward has another gradient.
        if measured is None or measured[0]() is not gradient:
            found = self.measure(matrix_MO, Role.GRADIENT, BOTH, records)
            measured = kept[Role.GRADIENT.value] = (weakref.ref(gradient), found)
        return self.quantize(matrix_MO, Role.GRADIENT, along, measured[1])


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[M, features]``, also where there are no features."""
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor.unsqueeze(0)
