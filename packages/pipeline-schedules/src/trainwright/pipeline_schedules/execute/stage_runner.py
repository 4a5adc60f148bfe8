"""One stage's forward and backward of one microbatch, with nothing kept that backward needs not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from trainwright.pipeline_schedules.execute.boundary import (
    BoundarySpec,
    Crossing,
    TensorSpec,
    describe,
    require_declared,
)


@attrs.define(eq=False)
class Flight:
    """What is kept of a microbatch between a stage's forward and its backward.

    Outputs themselves are not kept, only where their gradients enter the graph; a tensor that no
    one else refers to is freed when it has been sent, and no storage is ever freed under others.

    Attributes:
        leaves: Boundary inputs whose gradients go back to the stage before, in message order.
        roots: Where gradients enter that are handed in: one for each output with a gradient
            message, None where this stage has no use for it.
        specs: The gradient messages that are expected, one for each root.
        losses: Where backward starts in this stage, and from what.
    """

    leaves: list[torch.Tensor] = attrs.field(factory=list)
    roots: list[GradientEdge | None] = attrs.field(factory=list)
    specs: list[TensorSpec] = attrs.field(factory=list)
    losses: list[tuple[GradientEdge, torch.Tensor]] = attrs.field(factory=list)


def enter(crossing: Crossing, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make leaves of received tensors, so that backward stops and collects gradients there."""
    recording = torch.is_grad_enabled()
    pairs = zip(tensors, crossing.specs, strict=True)
    return [t.detach().requires_grad_(recording and spec.needs_grad) for t, spec in pairs]


def leave(
    output: object, skips: Mapping[str, torch.Tensor], stage: int, boundary: BoundarySpec
) -> tuple[Crossing, list[torch.Tensor], Flight]:
    """Take a stage's output apart, skips behind it, and note where its gradients will enter.

    Raises:
        BoundaryError: The output cannot cross, or is not what was declared.
    """
    seen, tensors = describe(output, stage, skips)
    crossing = boundary.declared(stage)
    if crossing is None:
        crossing = seen
    else:
        require_declared(crossing, seen, stage)
    flight = Flight()
    for tensor, spec, own in zip(tensors, crossing.specs, seen.specs, strict=True):
        if spec.needs_grad:
            flight.specs.append(spec)
            flight.roots.append(get_gradient_edge(tensor) if own.needs_grad else None)
    return crossing, tensors, flight


def run_backward(flight: Flight, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Back-propagate; parameters accumulate into ``.grad``.

    Returns:
        The gradients of the boundary inputs, zeros for those that the stage did not use.
    """
    pairs = list(flight.losses)
    for root, gradient in zip(flight.roots, gradients, strict=True):
        if root is not None:
            pairs.append((root, gradient))
    if pairs:
        roots = [root for root, _ in pairs]
        torch.autograd.backward(roots, [gradient for _, gradient in pairs])
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in flight.leaves]
