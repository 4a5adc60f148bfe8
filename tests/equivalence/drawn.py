"""A state in the middle of training, drawn by name: weights, and what an optimizer keeps."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from torch import nn

from tests.optimizer_runs import Named
from trainwright.integration.optimizers import held
from trainwright.integration.parts import Parts
from trainwright.integration.training_state import materialise_states

BEGUN = 7
"""Updates that were made before."""

NOISE = 0.1
"""By how much weights have moved away from where they begin: every one of them matters now."""

MOMENT = 1e-3
SQUARES = ("exp_avg_sq", "row_var", "col_var", "variance")
"""What is kept of squares of gradients, which is positive."""


def weights_of(named: Mapping[str, torch.Tensor], scale: float = NOISE) -> dict[str, torch.Tensor]:
    """Return initial weights with noise."""
    return {
        name: weight.detach() + scale * _normal(name, weight.shape).to(weight.dtype)
        for name, weight in named.items()
    }


def state_of(label: str, key: str, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Return what an optimizer keeps under a key of a parameter, or of one matrix of a stack."""
    drawn = MOMENT * _normal(f"{label} {key}", shape)
    return drawn.square() + MOMENT**2 / 2 if key in SQUARES else drawn


@torch.no_grad()
def load_into_layout(parts: Parts, weights: Mapping[str, torch.Tensor]) -> None:
    """Put weights and drawn states into this rank's pieces."""
    materialise_states(parts, BEGUN)
    for name, piece in parts.model.pieces.items():
        local = piece.spec.extract(weights[name])
        piece.parameter.copy_(local.view_as(piece.parameter))
    for label, each in held(parts.optimizer).items():
        for key, value in each.values.items():
            if not _is_state(value):
                continue
            if each.is_whole:
                value.copy_(state_of(label, key, value.shape))
            else:
                whole = state_of(label, key, each.spec.global_shape)
                value.copy_(each.spec.extract(whole).view_as(value))
    parts.model.publish()
    parts.feed.load_state_dict({"consumed": BEGUN * parts.config.sizes.global_batch})


@torch.no_grad()
def load_into_oracle(optimizers: list[torch.optim.Optimizer], named: Named) -> None:
    """Give torch's own optimizers of the plain model the drawn states."""
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name, parameter in named.items():
        parameter.copy_(before[name])
    for label, (_, state) in states_by_label(optimizers, named).items():
        for key, value in state.items():
            if _is_state(value):
                value.copy_(state_of(label, key, value.shape))
            elif key == "step":
                state[key] = torch.full_like(value, BEGUN) if _is_tensor(value) else BEGUN


def states_by_label(
    optimizers: list[torch.optim.Optimizer], named: Named
) -> dict[str, tuple[nn.Parameter, dict[str, torch.Tensor]]]:
    """Return each parameter, or matrix of a stack, with what is kept of it."""
    labels = {id(parameter): name for name, parameter in named.items()}
    for name, parameter in named.items():
        for index, part in enumerate(getattr(parameter, "slices", ())):
            labels[id(part)] = f"{name}[{index}]"
    return {
        labels[id(parameter)]: (parameter, state)
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
    }


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_state(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _normal(name: str, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(math.prod(shape), generator=draws, dtype=torch.float64).view(*shape)
