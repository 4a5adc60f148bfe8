"""The decoder as pipeline stages that keep the plain model's names."""

# Shapes: B batch, S sequence, D model, E head features, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.integration.errors import ConfigError
from trainwright.integration.model.blocks import build_block, stream_norm
from trainwright.integration.model.layers import Layers
from trainwright.integration.model.packing import Packed, Places
from trainwright.integration.model.rotary import rotary_angles
from trainwright.integration.model.shape import ModelShape
from trainwright.pipeline_schedules.execute import StageOutput
from trainwright.stability_guards import shrink_gradient


class LayerRunner(Protocol):
    """Applies layers in turn, keeping or recomputing what backward needs."""

    def __call__(self, layers: Sequence[nn.Module], hidden: Any, *args: Any) -> Any:
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
        numbered = nn.ModuleDict({str(i): build_block(shape, layers, i) for i in blocks})
        self.model = nn.ModuleDict()
        if self.is_first or (self.is_last and shape.tied):
            self.model["embed_tokens"] = layers.embedding(shape.vocabulary, shape.width)
        if self.is_first and shape.positions == "learned":
            assert shape.max_positions is not None, "a shape checks that"
            self.model["embed_positions"] = layers.positions(shape.max_positions, shape.width)
        self.model["layers"] = numbered
        if self.is_last:
            self.model["norm"] = stream_norm(shape, layers)
            if not shape.tied:
                self.lm_head = layers.column(shape.width, shape.vocabulary)
        self._blocks: Sequence[nn.Module] = list(numbered.values())
        self._within_window: torch.Tensor | None = None
        self._angles = rotary_angles if shape.positions == "rotary" else _no_angles
        share = shape.embedding_gradient
        self._shrink = _whole_gradient if share is None else partial(shrink_gradient, share=share)

    def forward(
        self,
        hidden_BSD: torch.Tensor | None = None,
        *,
        tokens_BS: torch.Tensor,
        positions_S: torch.Tensor | None = None,
        documents_BS: torch.Tensor | None = None,
        ordinals_BS: torch.Tensor | None = None,
        **_: torch.Tensor,
    ) -> torch.Tensor | StageOutput:
        """Return the next stage's input [B, S, D], or logits [B, S, V] on the last stage.

        In training a model with experts adds the sum of its auxiliary losses, named "experts".

        Args:
            hidden_BSD: what the stage before returned; None on the first.
            tokens_BS: tokens, on every stage.
            positions_S: where S is a part of each sequence, which; None counts from 0.
            documents_BS: where sequences are packed, the document of each position of the *whole*
                sequences, int64 and on the CPU, the same on all ranks that share them; negative is
                padding. Documents do not see each other. None: each sequence is one.
            ordinals_BS: with documents, where each of the S positions stands in its own.
        """
        if positions_S is None:
            positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        if (documents_BS is None) != (ordinals_BS is None):
            raise ConfigError(
                "documents_BS without ordinals_BS, or the reverse: documents that do not see each "
                "other count their positions from their own start"
            )
        self._check_window(positions_S, documents_BS)
        where = positions_S if ordinals_BS is None else ordinals_BS
        if hidden_BSD is None:
            hidden_BSD = self._embed(tokens_BS, where)
        places = self._places(positions_S, where, documents_BS, hidden_BSD.dtype)
        losses = None
        if self.shape.experts is None:
            hidden_BSD = self.runner(self._blocks, hidden_BSD, places)
        else:
            stream = (hidden_BSD, places.cos.new_zeros(()))
            hidden_BSD, losses = self.runner(self._blocks, stream, places)
        if self.is_last:
            hidden_BSD = self._head(self.layers.enter(self.model["norm"](hidden_BSD)))
        if losses is None or not losses.requires_grad:
            return hidden_BSD
        return StageOutput(hidden_BSD, {"experts": losses})

    def loss(
        self, logits_BSV: torch.Tensor, *, labels_BS: torch.Tensor, **_: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of the token losses, in at least float32; labels are already shifted.

        In training the z-loss of the shape is part of it.
        """
        z_loss = (self.shape.z_loss or 0.0) if self.training else 0.0
        return self.layers.cross_entropy(logits_BSV, labels_BS, self.shape.vocabulary, z_loss).sum()

    def _embed(self, tokens_BS: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        hidden_BSD: torch.Tensor = self._shrink(self.model["embed_tokens"](tokens_BS))
        if self.shape.positions == "rotary":
            return hidden_BSD
        added: torch.Tensor = self.model["embed_positions"](self.layers.between(where))
        return hidden_BSD + added

    def _places(
        self,
        positions_S: torch.Tensor,
        where: torch.Tensor,
        documents_BS: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> Places:
        shape = self.shape
        width, base = shape.turned_width, shape.rope_base
        cos, sin = self._angles(where, width, base, dtype, shape.rope_scaling)
        between_S = self.layers.between(positions_S)
        if documents_BS is None:
            return Places(cos, sin, between_S)
        valid_BS = documents_BS.to(between_S.device)[:, between_S] >= 0
        return Places(cos, sin, between_S, valid_BS, Packed.of(documents_BS))

    def _check_window(self, positions_S: torch.Tensor, documents_BS: torch.Tensor | None) -> None:
        window = self.shape.window
        if window is None or (documents_BS is None and positions_S is self._within_window):
            return
        length = int(positions_S.max()) + 1 if documents_BS is None else documents_BS.shape[1]
        if length > window:
            raise ConfigError(
                f"sequences of {length} positions are longer than the model's sliding window of "
                f"{window}, beyond which it is not computed; sequences up to {window} work"
            )
        # In training it is the same tensor each time, which the host has to wait for only once.
        self._within_window = positions_S

    def _head(self, entered_BSD: torch.Tensor) -> torch.Tensor:
        # A rank's rows of the embedding are its rows of the head: both are cut along V.
        if self.shape.tied:
            table_VD = self.model["embed_tokens"].get_parameter("weight")
            return F.linear(entered_BSD, table_VD)
        logits_BSV: torch.Tensor = self.lm_head(entered_BSD)
        return logits_BSV


def _whole_gradient(embedded_BSD: torch.Tensor) -> torch.Tensor:
    return embedded_BSD


def _no_angles(
    where: torch.Tensor, head_width: int, base: float, dtype: torch.dtype, scaling: object
) -> tuple[torch.Tensor, torch.Tensor]:
    exact = dtype if dtype == torch.float64 else torch.float32
    none = torch.empty(0, dtype=exact, device=where.device)
    return none, none


def build_stage(
    shape: ModelShape, layers: Layers, blocks: range, runner: LayerRunner
) -> DecoderStage:
    """Build the stage that holds ``blocks`` of the model, with weights yet to be initialised."""
    return DecoderStage(shape, layers, blocks, runner)
