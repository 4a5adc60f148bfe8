"""What a recipe is: how the operands of a linear layer's products are scaled.

A recipe first measures a matrix, which may communicate, and then quantises it along the dim that a
product sums over, which does not. What it measured is kept for the backward.
"""

# Shapes: R rows, C columns of a matrix.

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.precision.formats import BlockQuantized, NumberFormat

from .memory import AmaxMemory
from .roles import Along, Cut, Ranges, Role

Multipliers = Mapping[Along, torch.Tensor]
"""What a matrix is multiplied by before it is encoded, for each dim that was asked for."""


@attrs.frozen(eq=False)
class Binding:
    """One matrix of one layer: where it lies, and what is remembered of it.

    Args:
        name: of the layer, for messages.
        role: which of its matrices.
        cut: the ranks that hold parts of it.
        memory: of earlier steps, where the recipe wants one.
    """

    name: str
    role: Role
    cut: Cut
    memory: AmaxMemory | None = None


class Recipe(Protocol):
    """How the matrices of a linear layer become codes and scales.

    Laws: every number of an operand is a code point times its scale. A matrix that holds NaN or
    infinity gives NaN in every product that reads the part with that scale, never a finite number.
    Zeros stay zeros. Ranks that hold parts of a matrix scale it as one rank would that held it all.
    """

    @property
    def turns(self) -> bool:
        """Whether codes along one dim serve, transposed, along the other."""
        ...

    @property
    def history_length(self) -> int:
        """Steps of which magnitudes are remembered; 0: no memory is wanted."""
        ...

    def format_of(self, role: Role) -> NumberFormat:
        """Return the format of the matrix in this role."""
        ...

    def check(self, binding: Binding, shape: torch.Size, wanted: Collection[Along]) -> None:
        """Refuse parts of a matrix that cannot be scaled as the whole would be."""
        ...

    def measure(
        self, matrix_RC: torch.Tensor, binding: Binding, wanted: Collection[Along], records: bool
    ) -> Multipliers:
        """Return what has to be known before the matrix is encoded along the dims wanted.

        Args:
            matrix_RC: this rank's part.
            binding: what it is.
            wanted: the dims that products will sum over.
            records: whether a memory takes note.
        """
        ...

    def quantize(
        self, matrix_RC: torch.Tensor, role: Role, along: Along, multipliers: Multipliers
    ) -> BlockQuantized:
        """Return the operand, its last dim the one that is summed over: [R, C], or [C, R]."""
        ...


@runtime_checkable
class TakesProducts(Protocol):
    """A linear layer of another package that computes its products by what it is given.

    Attributes:
        products: called in place of the plain products, as `Float8Products`; None: plain.
        in_features: I of the whole layer.
        out_features: O of the whole layer.
    """

    products: Any
    in_features: int
    out_features: int

    def feature_cuts(self) -> Mapping[str, tuple[Communicator, Ranges]]:
        """Return which of "in_features" and "out_features" are cut, by which ranks and how."""
        ...
