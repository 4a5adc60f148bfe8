"""Clipping by the global norm: one coefficient for all gradients, none where it is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from trainwright.collectives import Communicator
from trainwright.stability_guards.errors import GuardError, NonFiniteGradientError
from trainwright.stability_guards.gradients import (
    Found,
    Kinds,
    Parameters,
    all_local_values,
    by_kind,
    called,
    is_dtensor,
    with_gradients,
)
from trainwright.stability_guards.norms import norm_of_parts

_EPSILON = 1e-6  # that of torch.nn.utils.clip_grad_norm_


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what to multiply gradients by so that their norm is at most ``max_norm``.

    Args:
        norm: global norm of the gradients, 0-d.
        max_norm: the bound; ``math.inf`` for none.

    Returns:
        ``min(1, max_norm / (norm + 1e-6))`` as in torch, 0-d with the norm's dtype and device;
        1 where the norm is infinite or NaN. The host does not wait.

    Raises:
        GuardError: ``max_norm`` is not positive.
    """
    _check_max_norm(max_norm)
    coefficient = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    # Selected, not masked by a product: zero times infinity would be NaN.
    return torch.where(torch.isfinite(norm), coefficient, torch.ones_like(coefficient))


@torch.no_grad()
def clip_(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Scale gradients in place so that their norm, known already, is at most ``max_norm``.

    Args:
        gradients: the gradients on this rank, of any devices and dtypes; DTensors and coalesced
            sparse ones too.
        norm: their global norm, 0-d, in the same units: unscale both or neither.
        max_norm: the bound; ``math.inf`` for none.

    Returns:
        0-d bool tensor: True where the norm is not finite and the gradients were left untouched,
        so that the step must be skipped. The host does not wait.

    Raises:
        GuardError: ``max_norm`` is not positive.
    """
    coefficient = clip_coefficient(norm, max_norm)
    _scale(by_kind(all_local_values(gradients)), coefficient)
    return ~torch.isfinite(norm)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    communicator: Communicator | None = None,
    sharded: bool | Callable[[torch.Tensor], bool] = True,
) -> torch.Tensor:
    """Clip the gradients of ``parameters`` by their norm over all ranks; return that norm.

    Takes the place of ``torch.nn.utils.clip_grad_norm_``, with differences: a non-finite norm
    leaves the gradients untouched, each parameter counts once, 16-bit gradients are normed in
    float32, the norm may go over ranks, and DTensors on any meshes, plain and sparse gradients go
    in one call.

    Args:
        parameters: parameters, or (name, parameter) pairs for a message with names. A DTensor
            counts once over its own mesh.
        max_norm: the bound; ``math.inf`` for none.
        norm_type: p of the p-norm, positive or ``math.inf``.
        error_if_nonfinite: raise where the norm is not finite; the host waits for the device.
        communicator: the ranks that hold the shards; None where this process holds everything, and
            where DTensors do.
        sharded: which parameters differ from rank to rank of the communicator; those that do not
            are the same on all ranks and count on rank 0 only. On several axes: `counted_on`.

    Returns:
        The norm before clipping, 0-d, at least float32, the same on every rank. It is infinite or
        NaN exactly where nothing was clipped and the step must be skipped.

    Raises:
        GuardError: ``max_norm`` or ``norm_type`` is out of range, or a DTensor meets a communicator
            without a function that says whether it differs.
        NonFiniteGradientError: on every rank alike, naming this rank's non-finite parameters.

    Communicates:
        One all-reduce of 8 bytes (SUM), or 16 (MAX) for the infinity norm; DTensors what
        `global_norm` says.
    """
    _check_max_norm(max_norm)
    _check_norm_type(norm_type)
    found = with_gradients(parameters)
    differing, alike = part_gradients(found, communicator, sharded)
    kinds = by_kind(all_local_values(found.gradients) if not found.plain else found.gradients)
    norm = norm_of_parts(differing, alike, norm_type, communicator, kinds if found.plain else None)
    widest = torch.float32
    for _, dtype in kinds:
        widest = torch.promote_types(widest, dtype)
    device = next(iter(kinds))[0] if kinds else norm.device
    norm = norm.to(device, widest if kinds else norm.dtype)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise NonFiniteGradientError(_non_finite_message(norm, found, communicator))
    _scale(kinds, clip_coefficient(norm, max_norm))
    return norm


@torch.no_grad()
def non_finite_names(parameters: Parameters) -> tuple[str, ...]:
    """Return the names of this rank's parameters whose gradient is not finite.

    Args:
        parameters: (name, parameter) pairs, or parameters, which are named by their place.

    Returns:
        Names in the given order; the host waits for the device once.
    """
    return _non_finite(with_gradients(parameters))


def _scale(kinds: Kinds, coefficient: torch.Tensor) -> None:
    for (device, dtype), same_kind in kinds.items():
        # A coefficient in bfloat16 would be off by up to 1/256.
        wide = torch.promote_types(dtype, torch.float32)
        torch._foreach_mul_(same_kind, coefficient.to(device, wide, non_blocking=True))


def part_gradients(
    found: Found,
    communicator: Communicator | None,
    sharded: bool | Callable[[torch.Tensor], bool],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients that differ from rank to rank, and those that are alike."""
    if communicator is None or (sharded is True and found.plain):
        return list(found.gradients), []
    if not callable(sharded):
        placed = next((name for name, _, gradient in found if is_dtensor(gradient)), None)
        if placed is not None:
            raise GuardError(
                f"the gradient of {called(placed)} is a DTensor, which counts once over its own "
                "mesh; pass sharded as a function that says whether other ranks of the "
                "communicator hold another one (lambda p: True for stages of a pipeline), or no "
                "communicator"
            )
    parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for _, parameter, gradient in found:
        differs = sharded(parameter) if callable(sharded) else sharded
        parts[0 if differs else 1].append(gradient)
    return parts


def _non_finite(found: Found) -> tuple[str, ...]:
    if not found.names:
        return ()
    values = all_local_values(found.gradients)
    flags = [torch.isfinite(local).all().to(values[0].device) for local in values]
    finite = torch.stack(flags).tolist()
    return tuple(called(name) for (name, _, _), good in zip(found, finite, strict=True) if not good)


def _non_finite_message(norm: torch.Tensor, found: Found, communicator: Communicator | None) -> str:
    rank = 0 if communicator is None else communicator.rank
    names = _non_finite(found)
    if names:
        return f"the norm is {norm.item()}: on rank {rank} gradients of {', '.join(names)}"
    return (
        f"the norm is {norm.item()} though every gradient on rank {rank} is finite: another rank's "
        "is not, or its powers overflow"
    )


def _check_max_norm(max_norm: float) -> None:
    if not max_norm > 0.0:
        raise GuardError(f"max_norm must be positive, got {max_norm}; math.inf clips nothing")


def _check_norm_type(norm_type: float) -> None:
    if not isinstance(norm_type, int | float) or not norm_type > 0.0 or math.isnan(norm_type):
        raise GuardError(f"norm_type must be positive or math.inf, got {norm_type!r}")
