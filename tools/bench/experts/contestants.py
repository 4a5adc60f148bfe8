"""Ways to bring rows to the ranks of their experts and back: ours, and the messages alone."""

# Shapes: N tokens, K experts of a token, A rows sent, R rows received, D model.

from __future__ import annotations

from typing import Protocol

import attrs
import torch

from trainwright.collectives import Communicator, random
from trainwright.sharding import Mesh, MeshShape
from trainwright.sharding.expert import Routing
from trainwright.sharding.expert.exchange import combine, dispatch
from trainwright.sharding.expert.ranks import ExpertRanks
from trainwright.sharding.expert.trip import Trip, plan_trip


@attrs.frozen
class Size:
    """What travels.

    Args:
        tokens: Of a rank.
        width: Of a token.
        routing: How many experts there are and each token visits.
    """

    tokens: int
    width: int
    routing: Routing


SIZES = {
    "small": Size(2048, 1024, Routing(8, 2)),
    "fine": Size(1024, 1024, Routing(64, 6)),
    "tiny": Size(64, 32, Routing(8, 2)),
}


class Contestant(Protocol):
    """One way; one instance on each rank."""

    def step(self) -> None:
        """Send there and back, forward and backward."""


class Ours:
    """Everything between the router's decision and the sum over a token's experts."""

    def __init__(self, world: Communicator, size: Size, *, plans: bool = True) -> None:
        self.ranks = ExpertRanks.of(Mesh(world, MeshShape(dp=world.size, ep=world.size)))
        self.size = size
        self.plans = plans
        shape = (size.tokens, size.width)
        key = random.Key(0, f"hidden.{world.rank}")
        self.hidden_ND = random.normal(key, shape).requires_grad_()
        self.upstream_ND = torch.ones(shape)
        logits = random.normal(
            random.Key(0, f"logits.{world.rank}"), (size.tokens, size.routing.num_experts)
        )
        self.experts_NK = size.routing.choose(logits)
        self.weights_NK = size.routing.weights(logits, self.experts_NK).requires_grad_()
        self.trip = self.plan()

    def plan(self) -> Trip:
        """Agree on what travels."""
        return plan_trip(self.experts_NK, self.size.routing.num_experts, self.ranks)

    def step(self) -> None:
        """Run forward and backward once."""
        self.hidden_ND.grad = self.weights_NK.grad = None
        trip = self.plan() if self.plans else self.trip
        rows_RD = dispatch(self.hidden_ND, trip, self.ranks)
        combine(rows_RD, self.weights_NK, trip, self.ranks).backward(self.upstream_ND)


class Bare:
    """The same four all-to-alls of the same sizes, of rows that lie ready."""

    def __init__(self, world: Communicator, size: Size) -> None:
        ours = Ours(world, size)
        self.world = world
        self.trip = ours.trip
        self.there_AD = torch.ones(sum(self.trip.sent), size.width)
        self.back_RD = torch.ones(sum(self.trip.received), size.width)

    def step(self) -> None:
        """Send there and back, twice."""
        sent, received = self.trip.sent, self.trip.received
        for _ in range(2):
            arrived_RD = torch.empty_like(self.back_RD)
            self.world.all_to_all(arrived_RD, self.there_AD, received, sent).wait()
            returned_AD = torch.empty_like(self.there_AD)
            self.world.all_to_all(returned_AD, self.back_RD, sent, received).wait()
