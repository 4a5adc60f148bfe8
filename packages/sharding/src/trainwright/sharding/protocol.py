"""What the parts of this package, and its users, expect of each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from trainwright.collectives import ShardSpec
    from trainwright.sharding.placement.parameters import ParameterPlacement


@runtime_checkable
class ParallelModule(Protocol):
    """A module that knows how its own parameters are placed on the mesh."""

    def parameter_placements(self) -> Mapping[str, ParameterPlacement]:
        """Return the placement of each direct parameter that is not replicated everywhere."""
        ...


class GradientPiece(Protocol):
    """A tensor whose ``grad`` enters the norm, and the part of which global tensor it is."""

    @property
    def parameter(self) -> torch.Tensor:
        """The tensor; only its ``grad`` is read, and None counts as zero."""
        ...

    @property
    def spec(self) -> ShardSpec:
        """Where the piece lies, and the axes on which it is replicated."""
        ...
