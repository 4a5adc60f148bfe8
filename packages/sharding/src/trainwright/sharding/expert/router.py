"""The router: a small product in at least float32, and the bias that balances."""

# Shapes: N tokens, D model, E experts.

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.collectives import Communicator, random
from trainwright.sharding.expert.routing import Routing
from trainwright.sharding.placement.parameters import ParameterPlacement
from trainwright.sharding.placement.values import Partial
from trainwright.sharding.tensor.initial import draw_parameter_
from trainwright.sharding.tensor.linear import TensorOptions, zeros


class Router(nn.Module):
    """Scores every expert for every token.

    ``weight`` [E, D] is whole on every rank; each tp rank routes other tokens, so its gradient is
    `Partial` on tp. With ``routing.biased`` there is a buffer ``e_score_correction_bias`` [E], in
    at least float32, as DeepSeek-V3's modules name it.

    Args:
        routing: The rule.
        width: D.
        tp: The tensor-parallel ranks.
        options: ``device`` and ``dtype`` of the weight.
    """

    e_score_correction_bias: torch.Tensor | None

    def __init__(
        self, routing: Routing, width: int, tp: Communicator, **options: Unpack[TensorOptions]
    ) -> None:
        super().__init__()
        self.routing = routing
        self.tp = tp
        self.weight = zeros((routing.num_experts, width), options)
        bias = None
        if routing.biased:
            exact = _at_least_float32(self.weight.dtype)
            bias = torch.zeros(routing.num_experts, dtype=exact, device=self.weight.device)
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, E], computed in at least float32 also under autocast."""
        exact = _at_least_float32(hidden_ND.dtype)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return F.linear(hidden_ND.to(exact), self.weight.to(exact))

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return where ``weight`` lies: everywhere, each tp rank with a term of its gradient."""
        gradient = {"tp": Partial()} if self.tp.size > 1 else {}
        return {"weight": ParameterPlacement.replicated(self.weight.shape, gradient)}

    def reset_parameters(self, key: random.Key, std: float) -> None:
        """Draw ``weight`` by place under ``key`` and make the bias zero."""
        draw_parameter_(self.weight, self.parameter_placements()["weight"], key, std)
        if self.e_score_correction_bias is not None:
            self.e_score_correction_bias.zero_()


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
