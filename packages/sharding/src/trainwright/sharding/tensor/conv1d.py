"""Linear layers cut over ranks whose weight is stored transposed, as GPT-2's ``Conv1D`` has it."""

# Shapes: ... any leading dims, I in_features, O out_features; a shard keeps its letters.

from __future__ import annotations

import inspect

import torch
from torch import nn

from trainwright.sharding.placement.parameters import ParameterPlacement
from trainwright.sharding.tensor.linear import ColumnParallelLinear, RowParallelLinear
from trainwright.sharding.tensor.parts import check_part, join_parts, take_part
from trainwright.sharding.tensor.products import multiply_columns, multiply_rows


class ColumnParallelConv1D(ColumnParallelLinear):
    """A `ColumnParallelLinear` with ``weight`` of ``[I, O]``, of which each rank has columns."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.weight = _transposed(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``[..., I]`` to this rank's part of ``[..., O]``, or to all of it if gathered."""
        output = multiply_columns(
            input,
            self.weight.t(),
            self.bias,
            self.tp,
            self.sequence,
            is_entered=self.input_is_entered,
        )
        return join_parts(output, self.tp, self.cut, -1) if self.gather_output else output

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return where ``weight`` lies, cut along dim 1, and ``bias``, along dim 0."""
        shape = (self.in_features, self.out_features)
        weight = ParameterPlacement.cut(shape, 1, self.cut, rank=self.tp.rank)
        return {**super().parameter_placements(), "weight": weight}


class RowParallelConv1D(RowParallelLinear):
    """A `RowParallelLinear` with ``weight`` of ``[I, O]``, of which each rank has rows."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.weight = _transposed(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map this rank's part of ``[..., I]``, or all of it if not parallel, to ``[..., O]``."""
        if self.input_is_parallel:
            check_part(input, self.tp, self.cut, -1)
        else:
            input = take_part(input, self.tp, self.cut, -1)
        output = multiply_rows(input, self.weight.t(), self.tp, self.sequence)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return where ``weight`` lies, cut along dim 0, and ``bias``, whole."""
        shape = (self.in_features, self.out_features)
        weight = ParameterPlacement.cut(shape, 0, self.cut, rank=self.tp.rank)
        return {**super().parameter_placements(), "weight": weight}


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module computes ``input @ weight + bias`` as the ``Conv1D`` of GPT-2 does.

    Known by what it is, because its library is no dependency: the name of the class, a forward of
    one argument, and the sizes ``nx`` and ``nf`` of its weight.
    """
    shape = (getattr(module, "nx", None), getattr(module, "nf", None))
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__ == "Conv1D"
        and isinstance(weight, torch.Tensor)
        and tuple(weight.shape) == shape
        and len(inspect.signature(module.forward).parameters) == 1
    )


def _transposed(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.detach().t().contiguous())
