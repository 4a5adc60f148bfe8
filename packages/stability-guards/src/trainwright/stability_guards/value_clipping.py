"""Clipping each element of gradients by itself."""

from __future__ import annotations

import math

import torch

from trainwright.collectives import Communicator
from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.gradients import (
    Found,
    Parameters,
    all_local_values,
    as_dtensor,
    by_kind,
    called,
    is_dtensor,
    with_gradients,
)
from trainwright.stability_guards.norms import norm_of_parts


@torch.no_grad()
def clip_grad_value_(
    parameters: Parameters, clip_value: float, *, communicator: Communicator | None = None
) -> torch.Tensor:
    """Clip each gradient element to ``[-clip_value, clip_value]``; return the largest magnitude.

    Takes the place of ``torch.nn.utils.clip_grad_value_``, which makes infinite elements finite in
    silence; here an element that is not finite, on any rank, leaves all gradients untouched.

    Args:
        parameters: parameters, or (name, parameter) pairs for a message with names.
        clip_value: the bound, positive; ``math.inf`` for none.
        communicator: all ranks that must skip together; None for this process and for DTensors
            whose meshes are these ranks.

    Returns:
        The largest magnitude before clipping, 0-d float64, the same on every rank: infinite or NaN
        exactly where nothing was clipped and the step must be skipped. The host does not wait.

    Raises:
        GuardError: the bound is not positive, or a DTensor is a partial sum, whose parts cannot be
            clipped one by one.

    Communicates:
        One MAX all-reduce of 16 bytes, and for DTensors one for each dim of a mesh.
    """
    if not clip_value > 0.0:
        raise GuardError(f"clip_value must be positive, got {clip_value}; math.inf clips nothing")
    found = with_gradients(parameters)
    check_no_partial(found)
    # A maximum counts an element as often as it likes.
    largest = norm_of_parts(found.gradients, (), math.inf, communicator)
    # Selected on the device: an infinite bound changes nothing, neither infinities nor NaN.
    bound = torch.where(torch.isfinite(largest), torch.full_like(largest, clip_value), math.inf)
    for (device, dtype), same_kind in by_kind(all_local_values(found.gradients)).items():
        most = bound.to(device, dtype, non_blocking=True)
        if device.type == "cpu":
            # Nothing waits for a host that computes itself, and numbers are clamped to faster.
            torch._foreach_clamp_max_(same_kind, most.item())
            torch._foreach_clamp_min_(same_kind, -most.item())
        else:
            torch._foreach_clamp_max_(same_kind, [most] * len(same_kind))
            torch._foreach_clamp_min_(same_kind, [-most] * len(same_kind))
    return largest


def check_no_partial(found: Found) -> None:
    """Refuse partial sums where elements or rows are judged by their own size.

    Raises:
        GuardError: a gradient is a DTensor with a partial placement.
    """
    for name, _, gradient in found:
        if is_dtensor(gradient) and any(p.is_partial() for p in as_dtensor(gradient).placements):
            raise GuardError(
                f"the gradient of {called(name)} is a partial sum, "
                f"{as_dtensor(gradient).placements}; redistribute it before it is clipped element "
                "by element or row by row"
            )
