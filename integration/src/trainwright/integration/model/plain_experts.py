"""A mixture of experts in plain PyTorch, one expert after the other: the serial model's."""

# Shapes: B batch, S sequence, D model, N tokens, E experts, K experts of a token, F features.

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from trainwright.integration.errors import ConfigError
from trainwright.integration.model.shape import ExpertShape
from trainwright.sharding.expert import Routing


@attrs.frozen(eq=False)
class PlainReport:
    """The auxiliary losses of one forward, 0-d sums over its tokens."""

    balance: torch.Tensor
    z: torch.Tensor


class PlainExperts(nn.Module):
    """Routes each token to its experts in a loop; no token is dropped.

    Args:
        width: D.
        experts: Their sizes and rule; no capacity, no groups, no bias, no scale.

    Raises:
        ConfigError: The rule has one of these.
    """

    def __init__(self, width: int, experts: ExpertShape) -> None:
        super().__init__()
        rule = experts.routing
        if rule != Routing(
            rule.num_experts, rule.top_k, score=rule.score, normalize=rule.normalize
        ):
            raise ConfigError(
                f"plain experts have no capacity, groups, bias, scale or other scope, got {rule}; "
                "MixtureOfExperts on a mesh of one rank has"
            )
        self.routing = experts.routing
        self.gate = nn.Linear(width, self.routing.num_experts, bias=False)
        self.experts = _Stacks(self.routing.num_experts, width, experts.width)
        self.shared_expert = None
        if experts.shared_width is not None:
            self.shared_expert = _Shared(width, experts.shared_width)

    def forward(
        self, hidden_BSD: torch.Tensor, *, positions_S: torch.Tensor
    ) -> tuple[torch.Tensor, PlainReport]:
        """Return the output [B, S, D] and the auxiliary losses."""
        logits_BSE = self.gate(hidden_BSD)
        scores_BSE = _scores(self.routing, logits_BSE)
        weights_BSK, chosen_BSK = scores_BSE.topk(self.routing.top_k, dim=-1)
        if self.routing.normalize:
            weights_BSK = weights_BSK / weights_BSK.sum(-1, keepdim=True)
        output_BSD = torch.zeros_like(hidden_BSD)
        if self.shared_expert is not None:
            output_BSD = self.shared_expert(hidden_BSD)
        for expert in range(self.routing.num_experts):
            weight_BS = (weights_BSK * (chosen_BSK == expert)).sum(-1)
            output_BSD = output_BSD + weight_BS[..., None] * self.experts(expert, hidden_BSD)
        return output_BSD, self._report(logits_BSE, chosen_BSK)

    def _report(self, logits_BSE: torch.Tensor, chosen_BSK: torch.Tensor) -> PlainReport:
        # Each sequence of T tokens counts T * E * sum of share of choices * mean probability.
        number = self.routing.num_experts
        share_BE = F.one_hot(chosen_BSK, number).to(logits_BSE.dtype).mean((1, 2))
        scores_BSE = _scores(self.routing, logits_BSE)
        probability_BE = (scores_BSE / scores_BSE.sum(-1, keepdim=True)).mean(1)
        balance = (share_BE * probability_BE).sum() * number * logits_BSE.shape[1]
        return PlainReport(balance, logits_BSE.logsumexp(-1).square().sum())


class _Stacks(nn.Module):
    def __init__(self, number: int, width: int, features: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(number, 2 * features, width))
        self.down_proj = nn.Parameter(torch.zeros(number, width, features))

    def forward(self, expert: int, hidden_BSD: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(hidden_BSD, self.gate_up_proj[expert]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down_proj[expert])


class _Shared(nn.Module):
    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, features, bias=False)
        self.up_proj = nn.Linear(width, features, bias=False)
        self.down_proj = nn.Linear(features, width, bias=False)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        gated = F.silu(self.gate_proj(hidden_BSD)) * self.up_proj(hidden_BSD)
        output: torch.Tensor = self.down_proj(gated)
        return output


def _scores(routing: Routing, logits_BSE: torch.Tensor) -> torch.Tensor:
    return logits_BSE.softmax(-1) if routing.score == "softmax" else logits_BSE.sigmoid()
