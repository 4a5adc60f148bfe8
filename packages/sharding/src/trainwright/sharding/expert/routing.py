"""Which experts a token goes to and with which weights: a rule, as data."""

# Shapes: N tokens, E experts, K experts of a token, G groups of experts.

from __future__ import annotations

import math
from typing import Literal

import attrs
import torch

from trainwright.sharding.errors import ShardingError

Score = Literal["softmax", "sigmoid"]
Scope = Literal["sequence", "microbatch"]

_SMALLEST_SUM = 1e-20
_ROUNDING = 1e-12


@attrs.frozen
class Routing:
    """How tokens choose experts, and how many an expert takes.

    Args:
        num_experts: E.
        top_k: K, the experts of a token.
        score: What makes scores of the router's logits: softmax over all experts, or the sigmoid
            of each.
        normalize: Whether the weights of a token's experts are divided by their sum. With softmax
            and K = 1 they are then 1, and only auxiliary losses train the router.
        scale: What the weights are multiplied with.
        groups: Blocks of experts, next to each other, of which a token uses ``top_groups``.
        top_groups: How many of them.
        group_best: A group is as good as the sum of so many of its best scores: 2 as in
            DeepSeek-V3, 1 as in DeepSeek-V2.
        biased: Whether experts are chosen by score plus a bias, which is no part of the weights;
            `update_expert_bias` moves it towards balance.
        capacity_factor: An expert takes at most ceil(capacity_factor * K * tokens / E) of the
            valid tokens of its scope, the first ones; None: all (dropless).
        scope: Over what tokens are counted, for the capacity and for the balance loss: each
            sequence, or all sequences of a micro-batch. "microbatch" depends on the layout: other
            micro-batches or data ranks make other groups, and so another loss.

    Raises:
        ShardingError: A number is out of its range.

    Source:
        Lepikhin et al., GShard (2020), section 2.2; Fedus et al., Switch Transformers (2021),
        section 2.2; DeepSeek-AI, DeepSeek-V3 (2024), section 2.1.2.
    """

    num_experts: int
    top_k: int
    score: Score = attrs.field(default="softmax", kw_only=True)
    normalize: bool = attrs.field(default=True, kw_only=True)
    scale: float = attrs.field(default=1.0, kw_only=True)
    groups: int = attrs.field(default=1, kw_only=True)
    top_groups: int = attrs.field(default=1, kw_only=True)
    group_best: int = attrs.field(default=2, kw_only=True)
    biased: bool = attrs.field(default=False, kw_only=True)
    capacity_factor: float | None = attrs.field(default=None, kw_only=True)
    scope: Scope = attrs.field(default="sequence", kw_only=True)

    def __attrs_post_init__(self) -> None:
        for name in ("num_experts", "top_k", "groups", "top_groups", "group_best"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ShardingError(f"routing: {name} must be a positive int, got {value!r}")
        self._check_groups()
        if self.score not in ("softmax", "sigmoid"):
            raise ShardingError(f"routing: score is softmax or sigmoid, got {self.score!r}")
        if self.scope not in ("sequence", "microbatch"):
            raise ShardingError(f"routing: scope is sequence or microbatch, got {self.scope!r}")
        factor = self.capacity_factor
        if factor is not None and not 0 < factor < math.inf:
            raise ShardingError(
                f"routing: capacity_factor must be finite and positive, got {factor}; None lets "
                "experts take all tokens"
            )

    def _check_groups(self) -> None:
        if self.num_experts % self.groups:
            raise ShardingError(
                f"routing: groups={self.groups} must divide num_experts={self.num_experts}"
            )
        if self.top_groups > self.groups:
            raise ShardingError(
                f"routing: top_groups={self.top_groups} of groups={self.groups} is too many"
            )
        usable = self.num_experts // self.groups * self.top_groups
        if self.top_k > usable:
            raise ShardingError(
                f"routing: top_k={self.top_k} experts of a token, but only {usable} can be chosen "
                f"(num_experts={self.num_experts}, groups={self.groups}, "
                f"top_groups={self.top_groups})"
            )

    def scores(self, logits_NE: torch.Tensor) -> torch.Tensor:
        """Return the score of each expert for each token [N, E]."""
        if self.score == "softmax":
            return logits_NE.softmax(-1)
        return logits_NE.sigmoid()

    def choose(self, logits_NE: torch.Tensor, bias_E: torch.Tensor | None = None) -> torch.Tensor:
        """Return the experts of each token [N, K], best first; of equal ones the first is better.

        Args:
            logits_NE: Of the router.
            bias_E: Added to the scores; None adds nothing.
        """
        with torch.no_grad():
            if bias_E is None and self.groups == 1:
                # As good as scores, which round to the same value where logits are far apart.
                return _best(logits_NE, self.top_k)
            scores = self.scores(logits_NE)
            if bias_E is not None:
                scores = scores + bias_E
            return _best(self._within_groups(scores), self.top_k)

    def weights(self, logits_NE: torch.Tensor, experts_NK: torch.Tensor) -> torch.Tensor:
        """Return the weight of each chosen expert [N, K], with gradients for the logits."""
        if self.score == "softmax" and self.normalize:
            chosen = logits_NE.gather(1, experts_NK).softmax(-1)
        else:
            chosen = self.scores(logits_NE).gather(1, experts_NK)
            if self.normalize:
                chosen = chosen / (chosen.sum(-1, keepdim=True) + _SMALLEST_SUM)
        return chosen if self.scale == 1.0 else chosen * self.scale

    def probabilities(self, logits_NE: torch.Tensor) -> torch.Tensor:
        """Return scores that sum to 1 for each token [N, E]: what balance is measured by."""
        scores = self.scores(logits_NE)
        if self.score == "softmax":
            return scores
        return scores / (scores.sum(-1, keepdim=True) + _SMALLEST_SUM)

    def capacities(self, tokens_G: torch.Tensor) -> torch.Tensor:
        """Return how many tokens each expert takes of scopes with so many valid tokens, int64."""
        assert self.capacity_factor is not None, "dropless experts have no capacity"
        share = self.capacity_factor * self.top_k / self.num_experts
        # What the factor's own rounding adds makes no further place: 1.1 * 100 / 10 are 11.
        return (tokens_G.to(torch.float64) * (share * (1 - _ROUNDING))).ceil().to(torch.int64)

    def _within_groups(self, scores_NE: torch.Tensor) -> torch.Tensor:
        if self.groups == 1:
            return scores_NE
        size = self.num_experts // self.groups
        scores_NGs = scores_NE.view(scores_NE.shape[0], self.groups, size)
        best = min(self.group_best, size)
        worth_NG = scores_NGs.sort(-1, descending=True).values[..., :best].sum(-1)
        used = torch.zeros_like(worth_NG, dtype=torch.bool)
        used.scatter_(1, _best(worth_NG, self.top_groups), True)
        return scores_NGs.masked_fill(~used[..., None], -math.inf).flatten(1)


def _best(values_NX: torch.Tensor, count: int) -> torch.Tensor:
    # A stable sort and not topk, which promises nothing about equal values.
    order_NX: torch.Tensor = values_NX.sort(dim=-1, descending=True, stable=True).indices
    return order_NX[:, :count]
