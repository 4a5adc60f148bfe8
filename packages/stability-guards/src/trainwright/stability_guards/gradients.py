"""The gradients of parameters on this rank, whatever they are wrapped in."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import attrs
import torch

from trainwright.stability_guards.errors import GuardError

Parameters = torch.Tensor | Iterable[torch.Tensor | tuple[str, torch.Tensor]]
"""Parameters, or (name, parameter) pairs for messages with names."""

_GRAD = operator.attrgetter("grad")
_IS_SPARSE = operator.attrgetter("is_sparse")
_KIND = operator.attrgetter("device", "dtype")

Kinds = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]
"""Tensors by device and dtype."""


@attrs.frozen(eq=False)
class Found:
    """Parameters that have a gradient, each once.

    Args:
        names: what each is called, or its place.
        parameters: the parameters.
        gradients: the gradient of each.
        plain: no gradient is a DTensor or sparse, so that each is its own local values.
    """

    names: Sequence[str | int]
    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    plain: bool

    def __iter__(self) -> Iterator[tuple[str | int, torch.Tensor, torch.Tensor]]:
        return zip(self.names, self.parameters, self.gradients, strict=True)


def with_gradients(parameters: Parameters) -> Found:
    """Return each parameter that has a gradient once, by its first name or place.

    A sparse gradient that repeats indices is replaced by the same one with their sums.
    """
    entries = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    names: Sequence[str | int] = range(len(entries))
    if any(issubclass(kind, tuple) for kind in set(map(type, entries))):
        pairs = [e if isinstance(e, tuple) else (place, e) for place, e in enumerate(entries)]
        names = [name for name, _ in pairs]
        tensors = [parameter for _, parameter in pairs]
    else:
        tensors = cast(list[torch.Tensor], entries)
    # Passes that each ask one question of every tensor: with many small ones, these are the cost.
    gradients: list[torch.Tensor | None] = list(map(_GRAD, tensors))
    found = [gradient for gradient in gradients if gradient is not None]
    if len(found) < len(tensors) or len(set(map(id, tensors))) < len(tensors):
        first = {id(t): place for place, t in reversed(list(enumerate(tensors)))}
        places = sorted(place for place in first.values() if gradients[place] is not None)
        names = [names[place] for place in places]
        tensors = [tensors[place] for place in places]
        found = [gradient for place in places if (gradient := gradients[place]) is not None]
    sparse = any(map(_IS_SPARSE, found))
    if sparse:
        found = [_coalesced(parameter) for parameter in tensors]
    plain = not sparse and not any(hasattr(kind, "to_local") for kind in set(map(type, found)))
    return Found(names, tensors, found, plain)


def _coalesced(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse and not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    return gradient


def called(name: str | int) -> str:
    """Return how a message calls a parameter."""
    return name if isinstance(name, str) else f"parameter {name}"


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


def all_local_values(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return `local_values` of each."""
    return [
        gradient
        if type(gradient) is torch.Tensor and not gradient.is_sparse
        else local_values(gradient)
        for gradient in gradients
    ]


def by_kind(tensors: Iterable[torch.Tensor]) -> Kinds:
    """Return tensors by device and dtype, in order."""
    listed = list(tensors)
    every: list[tuple[torch.device, torch.dtype]] = list(map(_KIND, listed))
    if len(set(every)) == 1:
        return {every[0]: listed}
    kinds: Kinds = {}
    for kind, tensor in zip(every, listed, strict=True):
        kinds.setdefault(kind, []).append(tensor)
    return kinds


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is one of ``torch.distributed.tensor``."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "to_local")


def as_dtensor(tensor: torch.Tensor) -> Any:
    """Return the tensor, whose mesh and placements the type checker need not know."""
    return tensor
