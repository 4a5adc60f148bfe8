"""What guards may watch of a model: its logits, those of attention, and how fast weights change."""

# Shapes: B batch, S sequence, H query heads, K key heads, E head features, L layers.

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from trainwright.collectives import ReduceOp
from trainwright.integration.chunks import Chunks
from trainwright.integration.errors import ConfigError
from trainwright.integration.model import DecoderStage, ModelShape
from trainwright.integration.model.blocks import Attention
from trainwright.pipeline_schedules.execute import StageOutput
from trainwright.sharding import Mesh
from trainwright.sharding.data import trained_specs

LOGIT = "logit_max"
"""The largest magnitude of a logit of the vocabulary."""
ATTENTION = "attention_logit_max"
"""What no logit of attention exceeds: by Cauchy and Schwarz, head by head, in linear time."""
UPDATE = "update_ratio"
"""The largest norm of a tensor's update over that of the tensor, of the update before."""


def check_signals(guards: str, watched: Collection[str], shape: ModelShape) -> None:
    """Check that a model brings what guards watch.

    Args:
        guards: what ``--guards`` says.
        watched: signals of the model.
        shape: the model's.

    Raises:
        ConfigError: it does not.
    """
    if shape.latent is not None and ATTENTION in watched:
        raise ConfigError(
            f"--guards {guards} watches {ATTENTION}, which latent attention does not bring; name "
            "guards in a file, without attention-growth"
        )


class Signals:
    """Measures a model at every so many steps; the same numbers on every rank.

    Nothing is kept between them but an update's ratio, which the step after it reports; where a
    run is stopped just there it is lost. The host waits no more than it does anyway: the numbers
    travel with the norm's.

    Args:
        mesh: all ranks.
        model: this rank's stages.
        optimizer: of its pieces.
        every: steps from one measurement to the next; 0 for none, which leaves no hook.

    Communicates: at a measured step one MAX all-reduce over the ranks that have the same heads and
        one of 24 bytes over the world; at the step after it one SUM all-reduce of 16 bytes a tensor
        over the ranks that have the same stages, and again the 24 bytes.
    """

    def __init__(
        self, mesh: Mesh, model: Chunks, optimizer: torch.optim.Optimizer, every: int
    ) -> None:
        self._mesh = mesh
        self._model = model
        self._every = every
        self._listening = False
        self._logit: torch.Tensor | None = None
        self._heads: dict[tuple[int, str], torch.Tensor] = {}
        self._attentions: list[Attention] = []
        self._before: dict[str, torch.Tensor] = {}
        self._squares: torch.Tensor | None = None
        models = dict.fromkeys(model.parallel.values())
        self._names = [name for each in models for name in trained_specs(each)]
        if not every:
            return
        # Every data and context rank has the same layers, in the same order.
        for number in sorted(model.stages):
            self._hook(model.stages[number])
        optimizer.register_step_pre_hook(self._keep_weights)
        optimizer.register_step_post_hook(self._compare_weights)

    def listen(self, step: int) -> None:
        """Measure the step with this number if it is due; before its forward passes."""
        self._listening = bool(self._every) and step % self._every == 0
        self._logit = None
        self._heads = {}

    def heard(self) -> Mapping[str, torch.Tensor]:
        """Return what was measured, 0-d tensors by name; every rank calls it once a step."""
        found: dict[str, torch.Tensor | None] = {}
        if self._listening:
            found = {LOGIT: self._logit}
            if self._attentions:
                found[ATTENTION] = self._largest_bound()
        if self._squares is not None:
            found[UPDATE] = self._ratio(self._squares)
            self._squares = None
        if not found:
            return {}
        nothing = torch.zeros((), dtype=torch.float64, device=self._mesh.world.device)
        packed = torch.stack([nothing if v is None else v.double() for v in found.values()])
        self._mesh.world.all_reduce(packed, ReduceOp.MAX).wait()
        return dict(zip(found, packed.unbind(), strict=True))

    def _hook(self, stage: DecoderStage) -> None:
        if stage.is_last:
            stage.register_forward_hook(self._hear_logits)
        for module in stage.modules():
            if isinstance(module, Attention):
                place = len(self._attentions)
                self._attentions.append(module)
                # Turning by an angle leaves norms as they are.
                module.q_norm.register_forward_hook(self._hears_heads(place, "q"))
                module.k_norm.register_forward_hook(self._hears_heads(place, "k"))

    @torch.no_grad()
    def _hear_logits(self, stage: nn.Module, given: Any, output: Any) -> None:
        if not self._listening or not stage.training:
            return
        logits_BSV = output.output if isinstance(output, StageOutput) else output
        if logits_BSV.numel():
            largest = logits_BSV.detach().abs().amax().double()
            self._logit = largest if self._logit is None else torch.maximum(self._logit, largest)

    def _hears_heads(self, place: int, which: str) -> Callable[[nn.Module, Any, Any], None]:
        @torch.no_grad()
        def hear(module: nn.Module, given: Any, output: torch.Tensor) -> None:
            if not self._listening or not module.training:
                return
            wide = torch.promote_types(output.dtype, torch.float32)
            norms_H = torch.linalg.vector_norm(output.detach(), dim=-1, dtype=wide).amax((0, 2))
            known = self._heads.get((place, which))
            largest = norms_H if known is None else torch.maximum(known, norms_H)
            self._heads[place, which] = largest

        return hear

    def _largest_bound(self) -> torch.Tensor:
        places = [(at, which) for at in range(len(self._attentions)) for which in ("q", "k")]
        norms = [self._heads[place].double() for place in places]
        packed = torch.cat(norms)
        self._mesh.communicator("dp", "cp").all_reduce(packed, ReduceOp.MAX).wait()
        by_place = dict(
            zip(places, torch.split(packed, [len(each) for each in norms]), strict=True)
        )
        bounds = []
        for at, attention in enumerate(self._attentions):
            q_H, k_K = by_place[at, "q"], by_place[at, "k"]
            k_H = k_K.repeat_interleave(len(q_H) // len(k_K))
            bounds.append((q_H * k_H).amax() * attention.head_width**-0.5)
        return torch.stack(bounds).amax()

    def _keep_weights(self, *_: object) -> None:
        if self._listening:
            pieces = self._model.pieces.items()
            self._before = {name: piece.parameter.detach().clone() for name, piece in pieces}

    @torch.no_grad()
    def _compare_weights(self, *_: object) -> None:
        if not self._before:
            return
        pieces, before = self._model.pieces, self._before
        device = self._mesh.world.device
        squares = torch.zeros(2, len(self._names), dtype=torch.float64, device=device)
        # A rank may have nothing of a weight that others have.
        for place, name in enumerate(self._names):
            if name in before:
                change = pieces[name].parameter.detach() - before[name]
                squares[0, place] = change.double().square().sum()
                squares[1, place] = before[name].double().square().sum()
        self._squares = squares
        self._before = {}

    def _ratio(self, squares: torch.Tensor) -> torch.Tensor:
        # What ranks have alike counts several times on both sides.
        self._mesh.communicator("dp", "cp", "tp").all_reduce(squares).wait()
        change, weight = squares.sqrt()
        return torch.where(weight == 0, 0.0, change / weight).amax()
