"""A function that keeps its arguments and computes its activations again when backward comes."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.checkpointing.errors import ReplayError
from trainwright.checkpointing.protocol import Capture, Reenter

from .ambient import GlobalRandomness, capture_function_modes
from .arguments import Build, take_apart


def as_captures(captures: Iterable[Capture]) -> tuple[Capture, ...]:
    """Return the captures as a tuple."""
    return tuple(captures)


@attrs.frozen
class Recomputed:
    """Calls ``function`` so that only its arguments are kept, bitwise equal to calling it.

    When the backward needs an activation, ``function`` runs again on the same arguments, under the
    ambient state of its first run: autocast, ``with torch.device``, every `contextvars.ContextVar`,
    active `TorchFunctionMode`s, and what ``captures`` say. Tensors may be in any argument, also
    within dictionaries, lists, dataclasses; containers are seen as they were at the first run.

    Args:
        function: A module, or a function of tensors and other values.
        captures: For state that is in none of the above (a global flag, a thread's variable): each
            is called at every forward and returns what brings the state back.
        preserve_rng_state: Replay what the forward drew from PyTorch's global generators. They are
            read at each forward (5 KB, microseconds) and written only if it drew. Ranks that are
            threads of one process share them, so there a layer that draws from them cannot be
            replayed: draw by place instead. False leaves them alone: a layer that draws from them
            gets wrong gradients.
        early_stop: Leave the recomputation once all that backward asked for is there. What follows
            the last kept tensor then runs once, not twice; ``function`` and captured contexts are
            left by an exception of PyTorch's, which they must let pass.

    Not replayed: a `torch.Generator` of one's own, and effects on anything but the output (a
    counter is increased twice; running statistics of batch norm are updated twice).

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
    """

    function: Callable[..., Any]
    captures: tuple[Capture, ...] = attrs.field(default=(), converter=as_captures, kw_only=True)
    preserve_rng_state: bool = attrs.field(default=True, kw_only=True)
    early_stop: bool = attrs.field(default=True, kw_only=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``.

        Raises:
            ReplayError: In the backward, if a parameter changed since the forward.
            RuntimeError: In the backward, from PyTorch, if an argument tensor was changed in place,
                or the recomputation made tensors of other shapes or dtypes than the forward.
        """
        if not torch.is_grad_enabled():
            return self.function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        build = take_apart((args, kwargs), tensors)
        region = _Region(self, args, kwargs, build)
        # One positional argument a tensor: PyTorch saves those through autograd, whose version
        # counters notice changes. Keywords of the function cannot collide with checkpoint's own.
        return checkpoint(
            region.run,
            *tensors,
            use_reentrant=False,
            preserve_rng_state=False,  # done by the region, which leaves idle generators alone
            early_stop=self.early_stop,
        )


def recompute(
    function: Callable[..., Any],
    *,
    captures: Sequence[Capture] = (),
    preserve_rng_state: bool = True,
    early_stop: bool = True,
) -> Recomputed:
    """Return ``function`` with its activations recomputed instead of kept; see `Recomputed`."""
    return Recomputed(
        function,
        captures=captures,
        preserve_rng_state=preserve_rng_state,
        early_stop=early_stop,
    )


class _Region:
    """One call of a recomputed function: run once forward, and again for each backward."""

    def __init__(
        self, policy: Recomputed, args: tuple[Any, ...], kwargs: dict[str, Any], build: Build
    ) -> None:
        self._policy = policy
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._build = build
        self._context = contextvars.copy_context()
        self._reenters: list[Reenter] = []
        self._randomness: GlobalRandomness | None = None
        self._versions: list[tuple[str, torch.Tensor, int]] = []

    def run(self, *tensors: torch.Tensor) -> Any:
        if self._first is not None:
            args, kwargs = self._first
            self._first = None  # from here on the graph alone decides what stays alive
            return self._run_forward(tensors, args, kwargs)
        self._check_parameters()
        args, kwargs = self._build(tensors)
        return self._context.copy().run(self._run_again, args, kwargs)

    def _run_forward(
        self, tensors: tuple[torch.Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        policy = self._policy
        self._reenters = [capture() for capture in (capture_function_modes, *policy.captures)]
        self._versions = [
            (name, parameter, parameter._version)
            for name, parameter in _parameters(policy.function)
            if not parameter.is_inference()
        ]
        if not policy.preserve_rng_state:
            return policy.function(*args, **kwargs)
        randomness = GlobalRandomness(tensor.device for tensor in tensors)
        output = policy.function(*args, **kwargs)
        randomness.stop_watching()
        self._randomness = randomness
        return output

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with ExitStack() as stack:
            for reenter in self._reenters:
                stack.enter_context(reenter())
            if self._randomness is not None:
                stack.enter_context(self._randomness.replay())
            self._policy.function(*args, **kwargs)

    def _check_parameters(self) -> None:
        for name, parameter, version in self._versions:
            if parameter._version != version:
                raise ReplayError(
                    f"parameter {name} was changed in place between the forward and its "
                    "recomputation, so the gradients would be of other weights; finish backward "
                    "before the update, or keep this layer's activations"
                )


def _parameters(function: Callable[..., Any]) -> list[tuple[str, torch.Tensor]]:
    if isinstance(function, nn.Module):
        return list(function.named_parameters())
    found = getattr(function, "named_parameters", None)
    return list(found()) if callable(found) else []
