"""A mixture of experts in plain PyTorch, one expert after the other: the serial model's."""

# Shapes: B batch, S sequence, D model, N tokens, E experts, K experts of a token, F features.

from __future__ import annotations

import math

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
        experts: Their sizes and rule; no capacity, and the balance of each sequence.

    Raises:
        ConfigError: The rule has a capacity or another scope.
    """

    def __init__(self, width: int, experts: ExpertShape) -> None:
        super().__init__()
        rule = experts.routing
        if rule.capacity_factor is not None or rule.scope != "sequence":
            raise ConfigError(
                f"plain experts have no capacity or other scope, got {rule}; "
                "MixtureOfExperts on a mesh of one rank has"
            )
        self.routing = experts.routing
        self.gate = _Gate(width, self.routing)
        self.experts = _Stacks(self.routing.num_experts, width, experts.width)
        self.shared_expert = None
        if experts.shared_width is not None:
            self.shared_expert = _Shared(width, experts.shared_width)
        self.shared_expert_gate = None
        if experts.shared_gate:
            self.shared_expert_gate = nn.Linear(width, 1, bias=False)

    def forward(
        self,
        hidden_BSD: torch.Tensor,
        valid_BS: torch.Tensor | None = None,
        *,
        positions_S: torch.Tensor,
    ) -> tuple[torch.Tensor, PlainReport]:
        """Return the output [B, S, D], 0 where not valid, and the auxiliary losses."""
        if valid_BS is None:
            valid_BS = hidden_BSD.new_ones(hidden_BSD.shape[:2], dtype=torch.bool)
        hidden_BSD = hidden_BSD.masked_fill(~valid_BS[..., None], 0.0)
        logits_BSE = self.gate(hidden_BSD)
        scores_BSE = _scores(self.routing, logits_BSE)
        chosen_BSK = _choose(self.routing, scores_BSE, self.gate.e_score_correction_bias)
        weights_BSK = scores_BSE.gather(-1, chosen_BSK)
        if self.routing.normalize:
            weights_BSK = weights_BSK / weights_BSK.sum(-1, keepdim=True)
        weights_BSK = weights_BSK * self.routing.scale
        # Weights are at least float32, and so are sums over experts, which are rounded once.
        routed_BSD = torch.zeros_like(hidden_BSD, dtype=weights_BSK.dtype)
        for expert in range(self.routing.num_experts):
            weight_BS = (weights_BSK * (chosen_BSK == expert)).sum(-1)
            routed_BSD = routed_BSD + weight_BS[..., None] * self.experts(expert, hidden_BSD)
        output_BSD = routed_BSD.to(hidden_BSD.dtype) + self._share(hidden_BSD)
        output_BSD = output_BSD.masked_fill(~valid_BS[..., None], 0.0)
        return output_BSD, self._report(logits_BSE, chosen_BSK, valid_BS)

    def _share(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        if self.shared_expert is None:
            return torch.zeros_like(hidden_BSD)
        output_BSD: torch.Tensor = self.shared_expert(hidden_BSD)
        if self.shared_expert_gate is not None:
            output_BSD = output_BSD * self.shared_expert_gate(hidden_BSD).sigmoid()
        return output_BSD

    def _report(
        self, logits_BSE: torch.Tensor, chosen_BSK: torch.Tensor, valid_BS: torch.Tensor
    ) -> PlainReport:
        # Each sequence of T tokens counts T * E * sum of share of choices * mean probability.
        number = self.routing.num_experts
        real_BS1 = valid_BS[..., None].to(logits_BSE.dtype)
        tokens_B = real_BS1.sum((1, 2)).clamp_min(1)
        choices_BSE = F.one_hot(chosen_BSK, number).to(logits_BSE.dtype).sum(2)
        share_BE = (choices_BSE * real_BS1).sum(1) / (tokens_B[:, None] * self.routing.top_k)
        scores_BSE = _scores(self.routing, logits_BSE)
        shares_BSE = scores_BSE / scores_BSE.sum(-1, keepdim=True)
        balance = (share_BE * (shares_BSE * real_BS1).sum(1)).sum() * number
        squares_BS = logits_BSE.logsumexp(-1).square() * valid_BS
        return PlainReport(balance, squares_BS.sum())


class _Gate(nn.Module):
    e_score_correction_bias: torch.Tensor | None

    def __init__(self, width: int, routing: Routing) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(routing.num_experts, width))
        bias = torch.zeros(routing.num_experts) if routing.biased else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        exact = torch.promote_types(hidden_BSD.dtype, torch.float32)
        return F.linear(hidden_BSD.to(exact), self.weight.to(exact))


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


def _choose(
    routing: Routing, scores_BSE: torch.Tensor, bias_E: torch.Tensor | None
) -> torch.Tensor:
    """Return the best experts of each token [B, S, K], of its best groups of experts."""
    scores_BSE = scores_BSE.detach()
    if bias_E is not None:
        scores_BSE = scores_BSE + bias_E
    scores_BSGe = scores_BSE.view(*scores_BSE.shape[:-1], routing.groups, -1)
    best = min(routing.group_best, scores_BSGe.shape[-1])
    worth_BSG = scores_BSGe.topk(best, -1).values.sum(-1)
    used_BSG = worth_BSG.topk(routing.top_groups, -1).indices
    barred_BSG = torch.ones_like(worth_BSG).scatter(-1, used_BSG, 0.0).bool()
    scores_BSE = scores_BSGe.masked_fill(barred_BSG[..., None], -math.inf).flatten(-2)
    return scores_BSE.topk(routing.top_k, -1).indices


def _scores(routing: Routing, logits_BSE: torch.Tensor) -> torch.Tensor:
    return logits_BSE.softmax(-1) if routing.score == "softmax" else logits_BSE.sigmoid()
