"""Weights of queries and keys shrunk where a head's attention logits have grown past a bound."""

# Shapes: B batch, H query heads, K key heads, S sequence, E head features.

from __future__ import annotations

from collections.abc import Callable

import torch

from trainwright.collectives import ReduceOp
from trainwright.integration.chunks import Chunks
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.model import ModelShape
from trainwright.integration.model.blocks import Attention, Places
from trainwright.sharding import Mesh
from trainwright.sharding.data import Piece
from trainwright.sharding.tensor import HeadLayout
from trainwright.stability_guards import largest_logits, qk_clip_factors


class HeadClipping:
    """Hears each head's largest logit in training, and clips after each applied update.

    The logits are computed a second time, in float32, for their largest.

    Args:
        mesh: all ranks.
        model: this rank's stages.
        shape: the model's.
        bound: the largest logit allowed; None hears and clips nothing.

    Communicates: after an applied update one MAX all-reduce of 8 bytes a head and layer over the
        ranks that have the same stages.

    Source: Kimi Team, Kimi K2 (2025), section 2.1, with the factors of `qk_clip_factors`.
    """

    def __init__(self, mesh: Mesh, model: Chunks, shape: ModelShape, bound: float | None) -> None:
        self._mesh = mesh
        self._model = model
        self._shape = shape
        self._bound = bound
        self._ears: dict[str, _Ear] = {}
        if bound is None:
            return
        # Every rank of a stage has the same layers, in the same order.
        for number in sorted(model.stages):
            for name, module in model.stages[number].named_modules():
                if isinstance(module, Attention):
                    self._ears[name] = _Ear(module)
                    module.place = self._ears[name]

    @torch.no_grad()
    def end_step(self) -> None:
        """Clip the heads of the pieces, before they are published."""
        if self._bound is None or not self._ears:
            return
        shape, pieces = self._shape, self._model.pieces
        largest_LH = self._largest()
        for name, largest_H in zip(self._ears, largest_LH, strict=True):
            q_H, k_K = qk_clip_factors(largest_H, shape.kv_heads, self._bound)
            for own, factors in (("q_proj", q_H), ("k_proj", k_K)):
                for kind in ("weight", "bias"):
                    if (piece := pieces.get(f"{name}.{own}.{kind}")) is not None:
                        _scale_rows(piece, factors.repeat_interleave(shape.head_width))
        self.discard_step()

    def discard_step(self) -> None:
        """Forget what was heard."""
        for ear in self._ears.values():
            ear.largest_H = None

    def _largest(self) -> torch.Tensor:
        shape, tp = self._shape, self._mesh.communicator("tp")
        layout = HeadLayout(shape.heads, shape.kv_heads, shape.head_width, tp.size)
        own = torch.arange(shape.heads * shape.head_width)
        own_heads = layout.query_cut().take(own, 0, tp.rank)[:: shape.head_width]
        first = int(own_heads[0]) // shape.head_width if len(own_heads) else 0
        device = self._mesh.world.device
        found_LH = torch.full(
            (len(self._ears), shape.heads), -torch.inf, dtype=torch.float64, device=device
        )
        for row_H, ear in zip(found_LH, self._ears.values(), strict=True):
            if ear.largest_H is not None:
                row_H[first : first + len(ear.largest_H)] = ear.largest_H
        same = self._mesh.communicator("dp", "cp", "tp")
        same.all_reduce(found_LH, ReduceOp.MAX).wait()
        return found_LH


class _Ear:
    """Stands in for what places queries and keys, which are handed to it in turn."""

    def __init__(self, attention: Attention) -> None:
        self._place: Callable[[torch.Tensor, Places], torch.Tensor] = attention.place
        self._attention = attention
        self._queries: torch.Tensor | None = None
        self.largest_H: torch.Tensor | None = None

    def __call__(self, x_BHSE: torch.Tensor, places: Places) -> torch.Tensor:
        placed_BXSE = self._place(x_BHSE, places)
        if self._attention.training:
            self._hear(placed_BXSE.detach())
        return placed_BXSE

    def _hear(self, placed_BXSE: torch.Tensor) -> None:
        if self._queries is None:
            self._queries = placed_BXSE
            return
        found_H = largest_logits(self._queries, placed_BXSE).double()
        self._queries = None
        known = self.largest_H
        self.largest_H = found_H if known is None else torch.maximum(known, found_H)


def _scale_rows(piece: Piece, factors: torch.Tensor) -> None:
    shape = piece.spec.global_shape
    whole = factors.view(-1, *[1] * (len(shape) - 1)).expand(shape)
    own = piece.spec.extract(whole).view(piece.parameter.shape)
    piece.parameter.mul_(own.to(piece.parameter))


def check_head_clipping(config: RunConfig, shape: ModelShape) -> None:
    """Check that the logits of heads can be heard.

    Raises:
        ConfigError: they are not those of whole sequences, or clipping would have no effect.
    """
    bound = config.guards.qk_clip
    if bound is None:
        return
    reasons = {
        "context ranks have parts of the sequences; set cp=1": config.parallel.mesh.cp > 1,
        "norms of queries and keys would undo it; leave out --qk-norm": shape.qk_norm,
        "keys of latent attention are not clipped here": shape.latent is not None,
        f"documents of --packing {config.data.packing} do not see each other; take stream": (
            config.data.packing != "stream"
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"--qk-clip {bound} needs each head's logits, but {reason}")
