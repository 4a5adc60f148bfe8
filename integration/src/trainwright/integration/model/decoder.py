"""The decoder as pipeline stages that keep the plain model's names."""

# Shapes: B batch, S sequence, D model, E head features, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.integration.model.blocks import Block, ExpertBlock, Layers, rotary_angles
from trainwright.integration.model.shape import ModelShape
from trainwright.pipeline_schedules.execute import StageOutput


class LayerRunner(Protocol):
    """Applies layers in turn, keeping or recomputing what backward needs."""

    def __call__(self, layers: Sequence[nn.Module], hidden: Any, *args: torch.Tensor) -> Any:
        """Return ``hidden`` after every layer, each called ``layer(hidden, *args)``."""
        ...


class DecoderStage(nn.Module):
    """A run of decoder blocks; the first stage embeds tokens, the last one returns logits.

    Parameter names are those of the whole model (``model.layers.7.mlp.up_proj.weight`` is the same
    weight in every layout), so that state dicts of stages join without renaming. Where embedding
    and head are tied, both the first and the last stage hold ``model.embed_tokens.weight``.
    """

    def __init__(
        self,
        shape: ModelShape,
        layers: Layers,
        blocks: range,
        runner: LayerRunner,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.layers = layers
        self.runner = runner
        self.is_first = blocks.start == 0
        self.is_last = blocks.stop == shape.layers
        numbered = nn.ModuleDict({str(i): _block(shape, layers) for i in blocks})
        self.model = nn.ModuleDict()
        if self.is_first or (self.is_last and shape.tied):
            self.model["embed_tokens"] = layers.embedding(shape.vocabulary, shape.width)
        self.model["layers"] = numbered
        if self.is_last:
            self.model["norm"] = layers.norm(shape.width, shape.norm_epsilon)
            if not shape.tied:
                self.lm_head = layers.column(shape.width, shape.vocabulary)
        self._blocks: Sequence[nn.Module] = list(numbered.values())

    def forward(
        self,
        hidden_BSD: torch.Tensor | None = None,
        *,
        tokens_BS: torch.Tensor,
        positions_S: torch.Tensor | None = None,
        **_: torch.Tensor,
    ) -> torch.Tensor | StageOutput:
        """Return the next stage's input [B, S, D], or logits [B, S, V] on the last stage.

        Where S is a part of each sequence, ``positions_S`` says which; None counts from 0. In
        training a model with experts adds the sum of its auxiliary losses, named "experts".
        """
        if hidden_BSD is None:
            hidden_BSD = self.model["embed_tokens"](tokens_BS)
        if positions_S is None:
            positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        cos_SE, sin_SE = rotary_angles(
            positions_S, self.shape.head_width, self.shape.rope_base, hidden_BSD.dtype
        )
        losses = None
        if self.shape.experts is None:
            hidden_BSD = self.runner(self._blocks, hidden_BSD, cos_SE, sin_SE)
        else:
            stream = (hidden_BSD, cos_SE.new_zeros(()))
            between_S = self.layers.between(positions_S)
            hidden_BSD, losses = self.runner(self._blocks, stream, cos_SE, sin_SE, between_S)
        if self.is_last:
            hidden_BSD = self._head(self.layers.enter(self.model["norm"](hidden_BSD)))
        if losses is None or not losses.requires_grad:
            return hidden_BSD
        return StageOutput(hidden_BSD, {"experts": losses})

    def loss(
        self, logits_BSV: torch.Tensor, *, labels_BS: torch.Tensor, **_: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of the token losses, in at least float32; labels are already shifted."""
        return self.layers.cross_entropy(logits_BSV, labels_BS, self.shape.vocabulary).sum()

    def _head(self, entered_BSD: torch.Tensor) -> torch.Tensor:
        # A rank's rows of the embedding are its rows of the head: both are cut along V.
        if self.shape.tied:
            table_VD = self.model["embed_tokens"].get_parameter("weight")
            return F.linear(entered_BSD, table_VD)
        logits_BSV: torch.Tensor = self.lm_head(entered_BSD)
        return logits_BSV


def _block(shape: ModelShape, layers: Layers) -> nn.Module:
    if shape.experts is None:
        return Block(shape, layers)
    return ExpertBlock(shape, shape.experts, layers)


def build_stage(
    shape: ModelShape, layers: Layers, blocks: range, runner: LayerRunner
) -> DecoderStage:
    """Build the stage that holds ``blocks`` of the model, with weights yet to be initialised."""
    return DecoderStage(shape, layers, blocks, runner)
