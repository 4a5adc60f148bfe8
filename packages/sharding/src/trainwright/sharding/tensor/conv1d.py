"""Linear layers cut over ranks whose weight is stored transposed, as GPT-2's ``Conv1D`` has it."""

# Shapes: ... any leading dims, I in_features, O out_features; a shard keeps its letters.

from __future__ import annotations

import inspect
from itertools import repeat

import torch
from torch import nn

from trainwright.collectives import Box, differentiable
from trainwright.sharding.placement.parameters import ParameterPlacement
from trainwright.sharding.placement.values import Shard
from trainwright.sharding.tensor.linear import ColumnParallelLinear, RowParallelLinear
from trainwright.sharding.tensor.multiplication import multiplication_of
from trainwright.sharding.tensor.parts import check_part, join_parts, take_part
from trainwright.sharding.tensor.products import multiply_columns, multiply_rows
from trainwright.sharding.tensor.sequence import enter_sequence


class ColumnParallelConv1D(ColumnParallelLinear):
    """A `ColumnParallelLinear` with ``weight`` of ``[I, O]``, of which each rank has columns.

    Where a rank keeps several ranges of equal width, as of [Q; K; V], ``weight`` is stored block
    after block, ``[blocks, I, width]``: so it is as many boxes of the whole, not one for each row
    and range.
    """

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        widths = {stop - start for start, stop in self.cut.ranges[self.tp.rank]}
        self.num_blocks = len(self.cut.ranges[self.tp.rank]) if len(widths) == 1 else 1
        columns = _transposed(self.weight)
        if self.num_blocks > 1:
            width = columns.shape[1] // self.num_blocks
            columns = columns.new_zeros(self.num_blocks, self.in_features, width)
        self.weight = nn.Parameter(columns)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``[..., I]`` to this rank's part of ``[..., O]``, or to all of it if gathered."""
        output = self._multiply(input)
        return join_parts(output, self.tp, self.cut, -1) if self.gather_output else output

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return where ``weight`` lies, cut along dim 1, and ``bias``, along dim 0."""
        shape = (self.in_features, self.out_features)
        if self.num_blocks == 1:
            weight = ParameterPlacement.cut(shape, 1, self.cut, rank=self.tp.rank)
        else:
            ranges = self.cut.ranges[self.tp.rank]
            boxes = [Box((0, start), (self.in_features, stop)) for start, stop in ranges]
            weight = ParameterPlacement(shape, boxes, {"tp": Shard(1)})
        placements = {"weight": weight}
        if self.bias is not None:
            placements["bias"] = ParameterPlacement.cut(shape[1:], 0, self.cut, rank=self.tp.rank)
        return placements

    def _multiply(self, input: torch.Tensor) -> torch.Tensor:
        if self.num_blocks == 1 or self.products is not None:
            return multiply_columns(
                input,
                self._rows(),
                self.bias,
                self.tp,
                self.sequence,
                is_entered=self.input_is_entered,
                by=multiplication_of(self, self.products),
            )
        if not self.input_is_entered:
            input = self._enter(input)
        biases = self.bias.chunk(self.num_blocks) if self.bias is not None else repeat(None)
        parts = [
            multiply_columns(input, block.t(), bias, self.tp, is_entered=True)
            for block, bias in zip(self.weight, biases, strict=False)
        ]
        return torch.cat(parts, -1)

    def _rows(self) -> torch.Tensor:
        """Return ``[O, I]``: a view, but of several blocks, which have one scale, a copy."""
        if self.num_blocks == 1:
            return self.weight.t()
        return self.weight.transpose(1, 2).flatten(0, 1)

    def _enter(self, input: torch.Tensor) -> torch.Tensor:
        if self.sequence is None:
            return differentiable.replicate_to_partial(input, self.tp)
        return enter_sequence(input, self.tp, self.sequence)


class RowParallelConv1D(RowParallelLinear):
    """A `RowParallelLinear` with ``weight`` of ``[I, O]``, of which each rank has rows."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.weight = nn.Parameter(_transposed(self.weight))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map this rank's part of ``[..., I]``, or all of it if not parallel, to ``[..., O]``."""
        if self.input_is_parallel:
            check_part(input, self.tp, self.cut, -1)
        else:
            input = take_part(input, self.tp, self.cut, -1)
        by = multiplication_of(self, self.products)
        output = multiply_rows(input, self.weight.t(), self.tp, self.sequence, by)
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


def to_stored(part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a copy of a part as a layer stores it: columns ``[I, O]`` in blocks if of 3 dims."""
    if len(shape) == part.ndim:
        return part.clone(memory_format=torch.contiguous_format)
    return part.reshape(shape[1], shape[0], shape[2]).movedim(1, 0).contiguous()


def from_stored(part: torch.Tensor) -> torch.Tensor:
    """Return the part of which `to_stored` made blocks."""
    return part.movedim(0, 1).flatten(1) if part.ndim == 3 else part


def _transposed(weight: nn.Parameter) -> torch.Tensor:
    return weight.detach().t().contiguous()
