"""The experts of one rank: SwiGLU blocks whose matrices lie in two stacks."""

# Shapes: R rows, D model, E experts, F features of an expert; L and f are this rank's E and F.

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.collectives import Box, Communicator, random
from trainwright.sharding.divisions import check_divides
from trainwright.sharding.expert.products import multiply_experts
from trainwright.sharding.placement.parameters import ParameterPlacement
from trainwright.sharding.placement.values import Shard
from trainwright.sharding.tensor.initial import draw_parameter_
from trainwright.sharding.tensor.linear import TensorOptions, zeros


class Experts(nn.Module):
    """Feed-forward blocks ``down(silu(gate(x)) * up(x))``, each of which computes its own rows.

    ``gate_up_proj`` [L, 2f, D] holds gate above up, ``down_proj`` is [L, D, f], named and laid out
    as in Hugging Face's modules. Of E experts ep rank r holds the r-th equal part, and of their F
    features etp rank q the q-th. Both are zero until drawn or loaded.

    Args:
        num_experts: E.
        width: D.
        expert_width: F.
        ep: The ranks that hold other experts.
        etp: The ranks that hold other features.
        options: ``device`` and ``dtype`` of the parameters.

    Raises:
        ShardingError: The ranks do not divide E or F.
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        expert_width: int,
        ep: Communicator,
        etp: Communicator,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        check_divides(num_experts, ep.size, "num_experts", "ep")
        check_divides(expert_width, etp.size, "expert_width", "etp")
        self.num_experts = num_experts
        self.width = width
        self.expert_width = expert_width
        self.ep = ep
        self.etp = etp
        local, features = num_experts // ep.size, expert_width // etp.size
        self.gate_up_proj = zeros((local, 2 * features, width), options)
        self.down_proj = zeros((local, width, features), options)

    def forward(self, rows_RD: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return each expert's output for its rows [R, D]; with etp > 1 this rank's terms.

        Args:
            rows_RD: In blocks, one expert after the other, as often as need be.
            sizes: Rows of each block; block i is of expert i modulo L.
        """
        gate, up = multiply_experts(rows_RD, self.gate_up_proj, sizes).chunk(2, -1)
        return multiply_experts(F.silu(gate) * up, self.down_proj, sizes)

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return where the stacks lie: experts over ep, features over etp, the same over edp."""
        experts, width, features = self.num_experts, self.width, self.expert_width
        local, part = experts // self.ep.size, features // self.etp.size
        first, begin = self.ep.rank * local, self.etp.rank * part
        cut = [
            Box((expert, at + begin, 0), (expert + 1, at + begin + part, width))
            for expert in range(first, first + local)
            for at in (0, features)
        ]
        whole = [Box((first, 0, 0), (first + local, 2 * features, width))]
        down = [Box((first, 0, begin), (first + local, width, begin + part))]
        return {
            "gate_up_proj": ParameterPlacement(
                (experts, 2 * features, width),
                whole if self.etp.size == 1 else cut,
                {"ep": Shard(0), "etp": Shard(1)},
            ),
            "down_proj": ParameterPlacement(
                (experts, width, features), down, {"ep": Shard(0), "etp": Shard(2)}
            ),
        }

    def reset_parameters(self, key: random.Key, std: float) -> None:
        """Draw both stacks by place, each under the key's name and its own."""
        for name, placement in self.parameter_placements().items():
            own = random.Key(key.seed, f"{key.name}.{name}", key.step)
            draw_parameter_(self.get_parameter(name), placement, own, std)

    def extra_repr(self) -> str:
        """Say the sizes and which part is here."""
        return (
            f"num_experts={self.num_experts}, width={self.width}, "
            f"expert_width={self.expert_width}, ep={self.ep.rank} of {self.ep.size}, "
            f"etp={self.etp.rank} of {self.etp.size}"
        )
