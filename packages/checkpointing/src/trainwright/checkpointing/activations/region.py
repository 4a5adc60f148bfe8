"""One call of a recomputed function: run once forward, and again for each backward."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import nn

from trainwright.checkpointing.errors import ReplayError
from trainwright.checkpointing.protocol import Capture, Reenter

from .ambient import capture_function_modes, capture_numerics
from .arguments import Build
from .buffers import Buffers
from .decisions import Decisions
from .fingerprints import Fingerprints
from .hidden_generators import GeneratorWatch
from .kept_operators import KeptOperators
from .measure import counting, tracker
from .randomness import Randomness, generators_of
from .reach import Segment, reached_from


@attrs.frozen(eq=False)
class RegionOptions:
    """How a region is run, as `Recomputed` says."""

    captures: tuple[Capture, ...]
    preserve_rng_state: bool
    verify: bool
    watch: bool
    kept: KeptOperators | None


class Region:
    """One call of ``function``.

    Args:
        function: What is run.
        options: How.
        arguments: Positional and keyword arguments of the first run.
        build: Makes arguments of the same kind around other tensors.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: RegionOptions,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        build: Build,
    ) -> None:
        self._function = function
        self._options = options
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = arguments
        self._build = build
        self._context = contextvars.copy_context()
        self._reenters: list[Reenter] = []
        self._randomness: Randomness | None = None
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._decisions = Decisions()
        self._fingerprints = Fingerprints() if options.verify else None
        self._counter = tracker()
        self._buffers: Buffers | None = None

    def run(self, *tensors: torch.Tensor) -> Any:
        """Run forward the first time, later again on what the arguments were."""
        if self._first is not None:
            args, kwargs = self._first
            self._first = None  # from here on the graph alone decides what stays alive
            # In a context of its own: what captures set is for the function, and ends with it.
            inside = self._context.copy()
            output, begun = inside.run(self._run_forward, tensors, args, kwargs)
            _set_changes(begun, inside)
            return output
        self._check_parameters()
        args, kwargs = self._build(tensors)
        return self._context.copy().run(self._run_again, args, kwargs)

    def _run_forward(
        self, tensors: tuple[torch.Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, contextvars.Context]:
        options = self._options
        captures = (capture_function_modes, capture_numerics, *options.captures)
        self._reenters = [capture() for capture in captures]
        begun = contextvars.copy_context()
        self._versions = [
            (name, parameter, parameter._version)
            for name, parameter in _parameters(self._function)
            if not parameter.is_inference()
        ]
        buffers = Buffers(_modules(self._function))
        randomness, generators = None, []
        if options.preserve_rng_state:
            generators = generators_of(self._function, (*args, *kwargs.values()))
            randomness = Randomness((tensor.device for tensor in tensors), generators)
        with ExitStack() as stack:
            if options.watch and randomness is not None:
                stack.enter_context(GeneratorWatch(generators))
            stack.enter_context(self._decisions.recording())
            if self._fingerprints is not None:
                stack.enter_context(self._fingerprints.taking())
            if options.kept is not None:
                stack.enter_context(options.kept.keeping())
            output = self._function(*args, **kwargs)
        buffers.forget_unchanged()
        self._buffers = buffers
        if randomness is not None:
            randomness.stop_watching()
        self._randomness = randomness
        return output, begun

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with ExitStack() as stack:
            for reenter in self._reenters:
                stack.enter_context(reenter())
            if self._randomness is not None:
                stack.enter_context(self._randomness.replay())
            if self._buffers is not None:
                stack.enter_context(self._buffers.as_before())
            stack.enter_context(self._decisions.replaying())
            stack.enter_context(counting(self._counter))
            if self._fingerprints is not None:
                stack.enter_context(self._fingerprints.comparing())
            if self._options.kept is not None:
                stack.enter_context(self._options.kept.giving())
            self._function(*args, **kwargs)

    def _check_parameters(self) -> None:
        for name, parameter, version in self._versions:
            if parameter._version != version:
                raise ReplayError(
                    f"parameter {name} was changed in place between the forward and its "
                    "recomputation, so the gradients would be of other weights; finish backward "
                    "before the update, or keep this layer's activations"
                )


def _set_changes(before: contextvars.Context, after: contextvars.Context) -> None:
    """Set the variables whose values are others after than before."""
    for variable, value in after.items():
        if variable not in before or before[variable] is not value:
            variable.set(value)


def _modules(function: object) -> Sequence[tuple[str, nn.Module]]:
    """Return the modules that a function makes use of, none of them within another, by name."""
    if isinstance(function, nn.Module):
        return [("", function)]
    if isinstance(function, Segment):
        numbered = enumerate(function.layers, function.first)
        return [(str(number), layer) for number, layer in numbered if isinstance(layer, nn.Module)]
    found = [each for each in reached_from(function) if isinstance(each, nn.Module)]
    inner = {id(each) for module in found for each in module.modules() if each is not module}
    return [(type(each).__name__, each) for each in found if id(each) not in inner]


def _parameters(function: object) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    for prefix, module in _modules(function):
        found += module.named_parameters(prefix=prefix)
    return found
