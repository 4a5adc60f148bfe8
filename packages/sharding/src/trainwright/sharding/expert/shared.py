"""The expert that every token visits."""

# Shapes: B batch, S sequence, D model, F features of the shared expert.

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.collectives import Communicator, differentiable, random
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorOptions,
)
from trainwright.sharding.tensor.sequence import SequenceSharding, enter_sequence


class SharedExpert(nn.Module):
    """A feed-forward block ``down(silu(gate(x)) * up(x))`` over the tensor-parallel ranks.

    Args:
        width: D.
        expert_width: F; several shared experts of width f are one of their summed width.
        tp: The tensor-parallel ranks; they share F as evenly as it can be.
        sequence: How positions are cut between products; None where they are not.
        options: ``device`` and ``dtype`` of the parameters.

    Communicates:
        Forward one all-reduce of the output and backward one of the input's gradient; with
        ``sequence`` what `enter_sequence` and `leave_sequence` say.
    """

    def __init__(
        self,
        width: int,
        expert_width: int,
        tp: Communicator,
        sequence: SequenceSharding | None = None,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence = sequence

        cut = Cut.balanced(expert_width, tp.size)

        def column() -> ColumnParallelLinear:
            return ColumnParallelLinear(
                width,
                expert_width,
                tp,
                cut=cut,
                input_is_entered=True,
                sequence=sequence,
                **options,
            )

        self.gate_proj = column()
        self.up_proj = column()
        self.down_proj = RowParallelLinear(
            expert_width, width, tp, cut=cut, sequence=sequence, **options
        )

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Return the block's output [B, S, D]."""
        if self.sequence is None:
            entered = differentiable.replicate_to_partial(hidden_BSD, self.tp)
        else:
            entered = enter_sequence(hidden_BSD, self.tp, self.sequence)
        output: torch.Tensor = self.down_proj(
            F.silu(self.gate_proj(entered)) * self.up_proj(entered)
        )
        return output

    def reset_parameters(self, key: random.Key, std: float) -> None:
        """Draw the three weights by place, each under the key's name and its own."""
        for name, layer in self.named_children():
            assert isinstance(layer, (ColumnParallelLinear, RowParallelLinear))
            layer.reset_parameters(random.Key(key.seed, f"{key.name}.{name}.weight", key.step), std)
