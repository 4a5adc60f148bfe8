"""The number formats of a run: what scales its losses, and which products take FP8 operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch

from trainwright.checkpointing.state import Sharded
from trainwright.collectives import Communicator, ShardSpec
from trainwright.integration.config import RunConfig
from trainwright.integration.model import DecoderStage
from trainwright.precision import (
    DynamicLossScaler,
    Hysteresis,
    LossScaler,
    StaticLossScaler,
    UnitLossScaler,
    policy,
)
from trainwright.precision.float8 import Float8State, Scope, convert_linears
from trainwright.sharding import Mesh
from trainwright.sharding.data import Piece

FLOAT8_LAYERS = ("model.layers.*",)
"""Embedding and head stay in the dtype of the run: they bear fewer bits badly."""

SAME_SCALES = ("dp", "cp", "tp")
"""The axes along which ranks have the same layers, or other parts of them."""


def choose_scaler(config: RunConfig, pieces: Mapping[str, Piece]) -> LossScaler:
    """Return what scales the losses: only float16 has too few exponents to do without.

    It has no communicator: it is told how many elements of the whole gradient are not finite.
    """
    if not scales_losses(config):
        return UnitLossScaler()
    told = config.scaling
    if told.loss_scale is not None:
        return StaticLossScaler(told.loss_scale)
    return DynamicLossScaler(
        told.initial_scale,
        growth_interval=told.scale_window,
        hysteresis=Hysteresis(told.hysteresis, told.hysteresis_refills),
        min_scale=told.min_scale,
        named_parameters=[(n, p.parameter) for n, p in pieces.items()],
    )


def scales_losses(config: RunConfig) -> bool:
    """Return whether a loss scale has to find its place."""
    return policy(config.dtype).compute is torch.float16


def may_overflow(scaler: LossScaler) -> bool:
    """Whether gradients overflow now and then in a healthy run: the scale finds its place so."""
    return not isinstance(scaler, UnitLossScaler)


@attrs.frozen(eq=False)
class ProductScales:
    """What the FP8 products of this rank's stages remember; empty where no product is FP8.

    Args:
        states: one a stage.
        ranks: those that have the same stages.
    """

    states: tuple[Float8State, ...]
    ranks: Communicator

    def end_step(self) -> None:
        """Agree on the scales of the next step, after the last backward of this one.

        What is not finite teaches nothing; the norm counts it.

        Communicates: with delayed scaling one all-reduce of 12 bytes a layer for each stage.
        """
        for state in self.states:
            state.end_step(self.ranks)

    def discard_step(self) -> None:
        """Forget this step, which is not applied; the scales of the next are those it had."""
        for state in self.states:
            state.discard_step()

    def tree(self) -> dict[str, dict[str, Sharded]]:
        """Return histories and scales by matrix, for a checkpoint."""
        return {
            name: {
                "history": _whole(f"{name} history", history),
                "scale": _whole(f"{name} scale", scales[name]),
            }
            for state in self.states
            for scales in (state.scales(),)
            for name, history in state.histories().items()
        }

    def restore(self, tree: Mapping[str, Mapping[str, Any]], num_steps: int) -> None:
        """Go on from a loaded `tree`, after so many steps."""
        for state in self.states:
            names = list(state.histories())
            state.load_state_dict(
                {
                    "num_steps": num_steps,
                    "history": {name: tree[name]["history"].tensor for name in names},
                    "scale": {name: tree[name]["scale"].tensor for name in names},
                }
            )


def give_float8(config: RunConfig, mesh: Mesh, stages: Iterable[DecoderStage]) -> ProductScales:
    """Give the products of the layers FP8 operands, if the settings say so.

    A largest magnitude is that of a whole sequence's tensor: over the ranks that share features,
    which layers say themselves, and over those that share positions.
    """
    recipe = policy(config.dtype).recipe
    ranks = mesh.communicator(*SAME_SCALES)
    if recipe is None:
        return ProductScales((), ranks)
    scope = Scope(tokens=mesh.communicator("cp"))
    return ProductScales(
        tuple(
            convert_linears(stage, recipe, FLOAT8_LAYERS, keep_ends=False, scope=scope)
            for stage in stages
        ),
        ranks,
    )


def _whole(name: str, tensor: torch.Tensor) -> Sharded:
    return Sharded(tensor, ShardSpec.full(name, tensor.shape, SAME_SCALES))
