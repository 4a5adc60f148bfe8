"""What the parts of this package, and its users, expect of each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

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


class WeightCodec(Protocol):
    """How the weights of a parameter travel where each rank keeps a part of them.

    Laws: the largest of what `measure` says of the parts is what it says of the whole, and grows
    where a part is not finite. Codes of an element depend on it and on what was measured alone, so
    that parts encode and decode as the whole does.
    """

    def measure(self, part: torch.Tensor) -> torch.Tensor:
        """Return a number that all ranks have to know, 0-d float32, >= 0; of nothing, zero."""
        ...

    def encode(self, part: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
        """Return one uint8 code for each element of a flat part."""
        ...

    def decode(
        self, codes: torch.Tensor, measured: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the weights in their dtype."""
        ...


class Products(Protocol):
    """The three products of a linear layer, where others than plain ones are wanted.

    A layer computes its output and both gradients by these alone, whatever is gathered or summed
    around them. It multiplies this rank's part of a weight, for all tokens that its input or
    gradient has once gathered. All ranks of a cut layer call them in the same order, and they may
    communicate among these.

    Laws: the results have the shapes of the plain products and the dtype asked for. `output` comes
    first; the gradients once for each backward, of the same values, and the weight's also alone and
    later. A forward that is run again gives the same result and is the same to any statistic.

    Operands are as they come: under autocast their dtypes may differ. ``records`` says whether the
    layer is trained: in ``train``, with gradients enabled. ``kept`` is one dict for the three calls
    that belong to one forward, in which small results such as scales may be left for the later
    ones; None where no backward will come.
    """

    def output(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        *,
        dtype: torch.dtype,
        records: bool,
        kept: dict[str, Any] | None,
    ) -> torch.Tensor:
        """Return ``input @ weight.T``: of ``[..., I]`` and ``[O, I]``, ``[..., O]``."""
        ...

    def input_gradient(
        self,
        gradient: torch.Tensor,
        weight: torch.Tensor,
        *,
        dtype: torch.dtype,
        records: bool,
        kept: dict[str, Any] | None,
    ) -> torch.Tensor:
        """Return ``gradient @ weight``: ``[..., I]``."""
        ...

    def weight_gradient(
        self,
        gradient: torch.Tensor,
        input: torch.Tensor,
        *,
        dtype: torch.dtype,
        records: bool,
        kept: dict[str, Any] | None,
    ) -> torch.Tensor:
        """Return the sum over tokens of ``gradient.T @ input``: ``[O, I]``."""
        ...
