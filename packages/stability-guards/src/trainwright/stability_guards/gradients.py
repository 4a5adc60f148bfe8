"""The gradients of parameters on this rank, whatever they are wrapped in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trainwright.stability_guards.errors import GuardError

Parameters = torch.Tensor | Iterable[torch.Tensor | tuple[str, torch.Tensor]]
"""Parameters, or (name, parameter) pairs for messages with names."""


def with_gradients(parameters: Parameters) -> list[tuple[str, torch.Tensor]]:
    """Return each parameter that has a gradient once, with its first name or its place."""
    entries = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    once: dict[torch.Tensor, str] = {}
    for index, entry in enumerate(entries):
        name, parameter = entry if isinstance(entry, tuple) else (f"parameter {index}", entry)
        if parameter.grad is not None:
            once.setdefault(parameter, name)
    return [(name, parameter) for parameter, name in once.items()]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter that has one; a sparse one without repeated indices."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse and not gradient.is_coalesced():
        # Repeated indices must be summed before anything but a sum is made of them.
        gradient = parameter.grad = gradient.coalesce()
    return gradient


def local_values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements of a gradient that this rank holds, as a plain tensor that shares them.

    The shard of a DTensor, the values of a sparse tensor, or the tensor itself.

    Raises:
        GuardError: a sparse gradient repeats indices.
    """
    if is_dtensor(gradient):
        local: torch.Tensor = as_dtensor(gradient).to_local()
        return local
    if gradient.is_sparse:
        if not gradient.is_coalesced():
            raise GuardError("a sparse gradient repeats indices; pass gradient.coalesce()")
        return gradient._values()
    return gradient


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is one of ``torch.distributed.tensor``."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "to_local")


def as_dtensor(tensor: torch.Tensor) -> Any:
    """Return the tensor, whose mesh and placements the type checker need not know."""
    return tensor
