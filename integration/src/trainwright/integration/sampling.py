"""How the next token is drawn from logits."""

# Shapes: B rows, V vocabulary.

from __future__ import annotations

import math

import attrs
import torch

from trainwright.collectives import random
from trainwright.integration.errors import ConfigError


@attrs.frozen
class Sampling:
    """A rule for drawing tokens by place: what is drawn depends on seed, row and step alone.

    Logits are divided by ``temperature``; then all but the ``top_k`` largest are left out, and of
    what remains all but the fewest whose probabilities add up to ``top_p``.

    Args:
        temperature: 0 takes the largest logit, of equal ones the first.
        top_k: how many tokens may come; None for all. Equals of the last one may come as well.
        top_p: share of the probability that may come, above 0 and at most 1.
        seed: of all draws.
        banned: tokens that never come.

    Raises:
        ConfigError: a number is out of its range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    banned: frozenset[int] = frozenset()

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"--temperature must be finite and not negative, got {self.temperature}; 0 takes "
                "the likeliest token"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k must be at least 1, got {self.top_k}; leave it out for all")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p must be above 0 and at most 1, got {self.top_p}")
        if self.seed < 0:
            raise ConfigError(f"--seed must not be negative, got {self.seed}")

    def draw(self, logits_BV: torch.Tensor, rows_B: torch.Tensor, step: int) -> torch.Tensor:
        """Return a token for each row [B]; -1 where the logits are not numbers.

        Args:
            logits_BV: of all of the vocabulary, which ``banned`` does not exhaust.
            rows_B: int64, the numbers of the rows among all that are drawn for.
            step: how many tokens each row has been given before.
        """
        exact_BV = logits_BV.double()
        if self.banned:
            exact_BV[:, sorted(self.banned)] = -math.inf
        wrong_B = exact_BV.isnan().any(1) | (exact_BV.amax(1).isinf())
        if self.temperature == 0:
            return exact_BV.argmax(1).masked_fill(wrong_B, -1)
        shares_BV = self.shares(exact_BV).nan_to_num(0.0)
        steps_BV = shares_BV.cumsum(1)
        key = random.Key(self.seed, "sample", step)
        draws_B = random.uniform_at(key, rows_B, dtype=torch.float64) * steps_BV[:, -1]
        drawn_B = torch.searchsorted(steps_BV, draws_B[:, None], right=True)[:, 0]
        # A product that rounds up to the sum itself belongs to the last token that may come.
        places_V = torch.arange(steps_BV.shape[1], device=steps_BV.device)
        last_B = torch.where(shares_BV > 0, places_V, 0).amax(1)
        return drawn_B.minimum(last_B).masked_fill(wrong_B, -1)

    def shares(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Return the probability of each token [B, V]; ``temperature`` is above 0."""
        # Relative to the largest, so that a temperature near 0 overflows to no infinity.
        scaled_BV = (logits_BV - logits_BV.amax(1, keepdim=True)) / self.temperature
        if self.top_k is not None and self.top_k < scaled_BV.shape[1]:
            least_B1 = scaled_BV.topk(self.top_k, dim=1).values[:, -1:]
            scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B1, -math.inf)
        shares_BV = scaled_BV.softmax(1)
        if self.top_p == 1:
            return shares_BV
        sorted_BV, order_BV = shares_BV.sort(stable=True, dim=1, descending=True)
        # The likeliest one always stays: before it there is nothing.
        before_BV = sorted_BV.cumsum(1) - sorted_BV
        kept_BV = torch.zeros_like(before_BV, dtype=torch.bool)
        kept_BV.scatter_(1, order_BV, before_BV < self.top_p)
        shares_BV = shares_BV.masked_fill(~kept_BV, 0.0)
        return shares_BV / shares_BV.sum(1, keepdim=True)
