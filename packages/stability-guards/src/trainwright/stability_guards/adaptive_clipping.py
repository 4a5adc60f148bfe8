"""Clipping each unit of a layer by the size of its own weights."""

# Shapes: R units (rows, dim 0) of a weight; a vector or scalar is one unit.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainwright.collectives import Communicator
from trainwright.stability_guards.clipping import part_gradients
from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.gradients import (
    Parameters,
    as_dtensor,
    called,
    is_dtensor,
    local_values,
    with_gradients,
)
from trainwright.stability_guards.norms import norm_of_parts
from trainwright.stability_guards.value_clipping import check_no_partial


@torch.no_grad()
def clip_grad_adaptive_(
    parameters: Parameters,
    clipping: float = 0.01,
    eps: float = 1e-3,
    *,
    communicator: Communicator | None = None,
    sharded: bool | Callable[[torch.Tensor], bool] = True,
) -> torch.Tensor:
    """Scale each unit's gradient to at most ``clipping`` times the norm of its weights.

    A unit is a row along dim 0 (an output of a linear layer or convolution, an entry of an
    embedding); a vector or scalar is one unit. The last layer is better left out, says the paper.

    Args:
        parameters: parameters, or (name, parameter) pairs for a message with names. Plain tensors
            hold whole units; DTensors may be cut along any dim.
        clipping: largest ratio of a unit's gradient to its weights, positive.
        eps: the norm of weights counts as at least this much, so that zeros can begin to learn.
        communicator: ranks whose gradients the returned norm is of, as in `clip_grad_norm_`.
        sharded: as in `clip_grad_norm_`.

    Returns:
        The global norm before clipping, 0-d float64, the same on every rank: infinite or NaN
        exactly where nothing was clipped and the step must be skipped. The host does not wait.

    Raises:
        GuardError: an argument is not positive; a gradient is sparse, or a partial sum.

    Communicates:
        What `clip_grad_norm_` does, and for DTensors that are cut through units two all-reduces
        of 8 bytes a unit for each dim of a mesh.

    Source:
        Brock, De, Smith and Simonyan, High-Performance Large-Scale Image Recognition Without
        Normalization (2021), equation 3 and section 4.1.
    """
    if not (clipping > 0.0 and eps > 0.0):
        raise GuardError(f"clipping and eps must be positive, got {clipping} and {eps}")
    found = with_gradients(parameters)
    check_no_partial(found)
    for name, _, gradient in found:
        if gradient.is_sparse:
            raise GuardError(f"the gradient of {called(name)} is sparse; make it dense")
    norm = norm_of_parts(*part_gradients(found, communicator, sharded), 2.0, communicator)
    weights = [_unit_squares(parameter.detach()) for parameter in found.parameters]
    gradients = [_unit_squares(gradient) for gradient in found.gradients]
    for squares in (weights, gradients):
        _add_over_meshes(found.gradients, squares)
    factors = _factors(weights, gradients, clipping, eps, torch.isfinite(norm))
    for gradient, factor_R in zip(found.gradients, factors, strict=True):
        values = local_values(gradient)
        rows = factor_R.view(-1, *[1] * (values.ndim - 1)) if values.ndim > 1 else factor_R[0]
        values.mul_(rows)
    return norm


def _unit_squares(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares of this rank's part of each unit."""
    local = local_values(tensor)
    wide = torch.promote_types(local.dtype, torch.float32)
    rows = local.flatten(1) if local.ndim > 1 else local.reshape(1, -1)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=wide)
    return norms.square()


def _factors(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    clipping: float,
    eps: float,
    finite: torch.Tensor,
) -> list[torch.Tensor]:
    """Return what to multiply each tensor's units by; computed for all tensors at once."""
    factors: dict[int, torch.Tensor] = {}
    places: dict[torch.device, list[int]] = {}
    for place, squares in enumerate(gradients):
        places.setdefault(squares.device, []).append(place)
    for device, here in places.items():
        weight_R = torch.cat([weights[place].to(device) for place in here]).sqrt()
        gradient_R = torch.cat([gradients[place] for place in here]).sqrt()
        most_R = clipping * weight_R.clamp(min=eps)
        clips_R = (gradient_R > most_R) & finite.to(device)
        factor_R = torch.where(clips_R, most_R / gradient_R, 1.0)
        at = 0
        for place in here:
            factors[place] = factor_R[at : at + len(gradients[place])]
            at += len(gradients[place])
    return [factors[place] for place in range(len(gradients))]


def _add_over_meshes(gradients: Sequence[torch.Tensor], squares: Sequence[torch.Tensor]) -> None:
    """Add up, in place, the squares of units that are cut over ranks, in one piece a mesh dim."""
    cut: dict[tuple[Any, int], list[torch.Tensor]] = {}
    for tensor, squares_R in zip(gradients, squares, strict=True):
        if not is_dtensor(tensor):
            continue
        gradient = as_dtensor(tensor)
        for dim, placement in enumerate(gradient.placements):
            whole_rows = gradient.ndim > 1 and getattr(placement, "dim", None) == 0
            if not (placement.is_replicate() or whole_rows):
                cut.setdefault((gradient.device_mesh, dim), []).append(squares_R)
    for (mesh, dim), parts in cut.items():
        packed = torch.cat([part.flatten().double() for part in parts])
        dist.all_reduce(packed, group=mesh.get_group(dim))
        at = 0
        for part in parts:
            part.copy_(packed[at : at + part.numel()].view_as(part))
            at += part.numel()
