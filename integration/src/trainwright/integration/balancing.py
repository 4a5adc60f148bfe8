"""Experts balanced by a bias on each one's score, which moves after each applied update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from trainwright.checkpointing.state import Sharded
from trainwright.collectives import ShardSpec
from trainwright.integration.model import DecoderStage
from trainwright.sharding import Mesh
from trainwright.sharding.expert import MixtureOfExperts, update_expert_bias

SAME_BIASES = ("dp", "cp", "tp")
"""The axes along which ranks have the same layers, and so the same biases."""


@attrs.frozen(eq=False)
class ExpertBalance:
    """The biases of this rank's layers whose rule has some, and the counts that move them.

    Args:
        mesh: all ranks.
        stages: this rank's stages, in the same order on all ranks that have the same.
        rate: what a bias is moved by.
    """

    mesh: Mesh
    stages: tuple[DecoderStage, ...]
    rate: float

    def end_step(self) -> None:
        """Move the biases by the choices of the step, whose update was applied.

        Communicates: what `update_expert_bias` does, once a stage.
        """
        for stage in self.stages:
            update_expert_bias(stage, self.mesh, self.rate)

    def discard_step(self) -> None:
        """Forget the choices of a step that was not applied."""
        for _, layer in self._layers():
            layer.forget_counts()

    def biases(self) -> dict[str, torch.Tensor]:
        """Return the live biases by the names of their buffers."""
        return {
            f"{name}.gate.e_score_correction_bias": _bias(layer) for name, layer in self._layers()
        }

    def tree(self) -> dict[str, Sharded]:
        """Return the biases for a checkpoint, which any layout reads."""
        return {
            name: Sharded(bias, ShardSpec.full(name, bias.shape, SAME_BIASES))
            for name, bias in self.biases().items()
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from a loaded `tree`."""
        self.load_state_dict({name: tree[name].tensor for name in self.biases()})

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the live biases."""
        return self.biases()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put biases back and forget what was counted since."""
        for name, bias in self.biases().items():
            bias.copy_(state[name])
        self.discard_step()

    def _layers(self) -> Iterator[tuple[str, MixtureOfExperts]]:
        for stage in self.stages:
            for name, layer in stage.named_modules():
                if isinstance(layer, MixtureOfExperts) and layer.routing.biased:
                    yield name, layer


def _bias(layer: MixtureOfExperts) -> torch.Tensor:
    bias = layer.gate.e_score_correction_bias
    assert bias is not None, "a biased rule has made a bias"
    return bias
