"""One stage's forward and backward of one microbatch, with nothing kept that backward needs not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from trainwright.pipeline_schedules.execute.errors import PipelineError
from trainwright.pipeline_schedules.execute.protocol import Loss


@attrs.define(eq=False)
class Flight:
    """What is kept of a microbatch between a stage's forward and its backward.

    Outputs themselves are not kept, only where their gradients enter the graph; a tensor that no
    one else refers to is freed when it has been sent, and no storage is ever freed under others.

    Attributes:
        leaves: Boundary inputs whose gradients go back to the stage before, in message order.
        roots: Where gradients enter: one for each output with a gradient message, None where
            this stage has no use for it; or the loss alone.
        specs: The gradient messages that are expected, one for each root; none for the loss.
    """

    leaves: list[torch.Tensor]
    roots: list[GradientEdge | None]
    specs: list[TensorSpec]


def enter(crossing: Crossing, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make leaves of received tensors, so that backward stops and collects gradients there."""
    recording = torch.is_grad_enabled()
    pairs = zip(tensors, crossing.specs, strict=True)
    return [t.detach().requires_grad_(recording and spec.needs_grad) for t, spec in pairs]


def leave(
    output: object, stage: int, boundary: BoundarySpec
) -> tuple[Crossing, list[torch.Tensor], Flight]:
    """Take a stage's output apart and note where its gradients will enter.

    Raises:
        BoundaryError: The output cannot cross, or is not what was declared.
    """
    seen, tensors = describe(output, stage)
    crossing = boundary.outputs.get(stage)
    if crossing is None:
        crossing = seen
    else:
        require_declared(crossing, seen, stage)
    flight = Flight([], [], [])
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
    pairs = [
        (root, gradient)
        for root, gradient in zip(flight.roots, gradients, strict=True)
        if root is not None
    ]
    if pairs:
        roots = [root for root, _ in pairs]
        torch.autograd.backward(roots, [gradient for _, gradient in pairs])
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in flight.leaves]


class KeywordSplit:
    """Deals the last stage's inputs out to stage and loss, by the names that each of them takes.

    What takes ``**kwargs`` is given everything, a name that both take goes to both.

    Args:
        stage: The module on the last stage.
        loss: Called with its output.
    """

    def __init__(self, stage: torch.nn.Module, loss: Loss) -> None:
        self._for_stage = _keyword_names(stage.forward, taken=0)
        loss_call = loss.forward if isinstance(loss, torch.nn.Module) else loss
        self._for_loss = _keyword_names(loss_call, taken=1)

    def split(self, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The inputs of the stage and those of the loss.

        Raises:
            PipelineError: A name that neither of them takes.
        """
        for_stage = _chosen(inputs, self._for_stage)
        for_loss = _chosen(inputs, self._for_loss)
        unused = inputs.keys() - for_stage.keys() - for_loss.keys()
        if unused:
            raise PipelineError(
                f"inputs of the last stage hold {sorted(unused)}, which neither the stage "
                f"(takes {sorted(self._for_stage or ())}) nor the loss "
                f"(takes {sorted(self._for_loss or ())}) has a parameter for"
            )
        return for_stage, for_loss


def _chosen(inputs: Mapping[str, Any], names: frozenset[str] | None) -> Mapping[str, Any]:
    if names is None:
        return inputs
    return {name: value for name, value in inputs.items() if name in names}


def _keyword_names(function: Callable[..., Any], taken: int) -> frozenset[str] | None:
    """Names that a function takes by keyword, without the first ``taken``; None for any name."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters[taken:] if p.kind in by_keyword)
