"""Balance without an auxiliary loss: a bias on each expert's score, moved once a step."""

from __future__ import annotations

import math

import torch
from torch import nn

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.expert.layer import MixtureOfExperts
from trainwright.sharding.mesh import Mesh


@torch.no_grad()
def update_expert_bias(model: nn.Module, mesh: Mesh, rate: float) -> None:
    """Raise the biases of experts that were chosen less than the mean, lower the others.

    Call it once a step after the update, on every rank; the counts are those of all micro-batches
    in training mode since the last call. After a step that was skipped, ``rate=0`` forgets them.

    Args:
        model: This rank's module; its layers with ``routing.biased`` are updated.
        mesh: The ranks.
        rate: What is added or taken; 0.001 in DeepSeek-V3.

    Raises:
        ShardingError: ``rate`` is negative or not finite.

    Communicates:
        One all-reduce over the ranks of the pipeline stage, 8 * E bytes a layer; none where the
        stage has no such layer.

    Source:
        Wang et al., Auxiliary-Loss-Free Load Balancing (2024), algorithm 1.
    """
    if not 0 <= rate < math.inf:
        raise ShardingError(f"the rate of the bias must be finite and >= 0, got {rate}")
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, MixtureOfExperts) and layer.routing.biased
    ]
    if not layers:
        return
    chosen = torch.cat([layer.step_counts for layer in layers])
    mesh.communicator("dp", "cp", "tp").all_reduce(chosen).wait()
    sizes = [layer.routing.num_experts for layer in layers]
    for layer, counts in zip(layers, torch.split(chosen, sizes), strict=True):
        bias = layer.gate.e_score_correction_bias
        assert bias is not None, "a biased rule has made a bias"
        exact = counts.to(torch.float64)
        bias += (rate * (exact.mean() - exact).sign()).to(bias.dtype)
        layer.forget_counts()
