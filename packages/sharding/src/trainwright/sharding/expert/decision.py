"""What a router decides in one forward, apart from the weights: kept for recomputations."""

# Shapes: N tokens, K experts of a token, E experts.

from __future__ import annotations

import attrs
import torch

from trainwright.sharding.expert.capacity import drop_late_choices
from trainwright.sharding.expert.ranks import ExpertRanks
from trainwright.sharding.expert.routing import Routing
from trainwright.sharding.expert.statistics import Counts, start_counting
from trainwright.sharding.expert.tokens import Tokens
from trainwright.sharding.expert.trip import Trip, plan_trip


@attrs.frozen(eq=False)
class Decision:
    """Where the tokens of one forward go.

    Args:
        experts: int64 [N, K], the chosen experts, also of tokens that are not sent.
        counts: Of the choices, before any is dropped.
        dropped: int64 [E], this rank's choices that found their expert full.
        trip: Which rows travel where.
    """

    experts: torch.Tensor
    counts: Counts
    dropped: torch.Tensor
    trip: Trip


@torch.no_grad()
def decide_routing(
    routing: Routing,
    logits_NE: torch.Tensor,
    bias_E: torch.Tensor | None,
    tokens: Tokens,
    ranks: ExpertRanks,
) -> Decision:
    """Choose experts, count the choices, drop those beyond a capacity and plan the trip.

    Communicates:
        What `start_counting`, `drop_late_choices` with a capacity, and `plan_trip` do.
    """
    num_experts = routing.num_experts
    experts = routing.choose(logits_NE, bias_E)
    real = experts
    if tokens.valid is not None:
        real = experts.masked_fill(~tokens.valid[:, None], num_experts)
    counts, counting = start_counting(real, tokens, num_experts, ranks.sequence)
    dropped = torch.zeros_like(counts.own)
    sent = real
    if routing.capacity_factor is not None:
        if counting is not None:
            counting.wait()
        capacities = routing.capacities(counts.tokens)
        sent = drop_late_choices(real, tokens, capacities, num_experts, ranks.sequence)
        late = (sent != real).flatten()
        dropped.index_add_(0, real.flatten() * late, late.to(torch.int64))
    trip = plan_trip(sent, num_experts, ranks)
    if counting is not None:
        counting.wait()
    return Decision(experts, counts, dropped, trip)
