"""Mixtures of experts: routing, dispatch over ep, experts on their own data ranks."""

from trainwright.sharding.expert.balance import update_expert_bias
from trainwright.sharding.expert.layer import MixtureOfExperts
from trainwright.sharding.expert.names import (
    MIXTRAL_NAMES,
    QWEN_NAMES,
    ExpertNames,
    stack_experts,
    unstack_experts,
)
from trainwright.sharding.expert.replay import capture_routing, routing_contexts
from trainwright.sharding.expert.report import RoutingReport
from trainwright.sharding.expert.routing import Routing

__all__ = [
    "MIXTRAL_NAMES",
    "QWEN_NAMES",
    "ExpertNames",
    "MixtureOfExperts",
    "Routing",
    "RoutingReport",
    "capture_routing",
    "routing_contexts",
    "stack_experts",
    "unstack_experts",
    "update_expert_bias",
]
