"""Activation policies: which layers of a stack are recomputed in the backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, Unpack

import attrs
from torch import nn

from trainwright.checkpointing.errors import PolicyError
from trainwright.checkpointing.protocol import Capture, Keeper

from .hidden_generators import Watched
from .reach import Segment
from .recompute import Recomputed, as_captures


class RecomputeOptions(TypedDict, total=False):
    """Options that policies hand to each `Recomputed`; all may be left out."""

    captures: Sequence[Capture]
    preserve_rng_state: bool
    early_stop: bool
    inputs: Keeper | None
    verify: bool


@attrs.frozen
class KeepAll:
    """Runs the layers one after the other and keeps every activation: the identity of policies."""

    def __call__(self, layers: Iterable[nn.Module], hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the last layer."""
        for layer in layers:
            hidden = layer(hidden, *args, **kwargs)
        return hidden


@attrs.frozen
class RecomputeEvery:
    """Keeps the input of every ``num_layers``-th layer and recomputes the layers in between.

    A stack of L layers keeps L / num_layers inputs, and during the backward the activations of
    num_layers layers; num_layers = sqrt(L) makes the two alike. Each layer runs forward twice.

    Args:
        num_layers: Layers that are recomputed together, at least 1; None takes the square root of
            their number, rounded up.
        captures: As in `Recomputed`, and so are the others.

    Raises:
        PolicyError: ``num_layers`` is not a positive integer.
    """

    num_layers: int | None = attrs.field()
    captures: tuple[Capture, ...] = attrs.field(default=(), converter=as_captures, kw_only=True)
    preserve_rng_state: bool = attrs.field(default=True, kw_only=True)
    early_stop: bool = attrs.field(default=True, kw_only=True)
    inputs: Keeper | None = attrs.field(default=None, kw_only=True)
    verify: bool = attrs.field(default=False, kw_only=True)
    watched: Watched = attrs.field(factory=Watched, init=False, eq=False, repr=False)

    @num_layers.validator
    def _check_num_layers(self, attribute: object, value: object) -> None:
        if value is not None and (type(value) is not int or value < 1):
            raise PolicyError(
                f"recompute_every needs a whole number of layers, at least 1, got {value!r}; "
                "1 recomputes each layer alone, keep_all() recomputes none"
            )

    def __call__(self, layers: Iterable[nn.Module], hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the last layer, bitwise that of `KeepAll`."""
        stack = list(layers)
        every = self.num_layers or max(1, math.isqrt(max(0, len(stack) - 1)) + 1)
        for first in range(0, len(stack), every):
            segment = Segment(tuple(stack[first : first + every]), first)
            hidden = recomputed(segment, self)(hidden, *args, **kwargs)
        return hidden


def recomputed(segment: Segment, policy: RecomputeEvery) -> Recomputed:
    """Return layers that are recomputed together, with the options of a policy."""
    return Recomputed(
        segment,
        captures=policy.captures,
        preserve_rng_state=policy.preserve_rng_state,
        early_stop=policy.early_stop,
        inputs=policy.inputs,
        verify=policy.verify,
        watched=policy.watched,
    )


def keep_all() -> KeepAll:
    """Return the policy that recomputes nothing."""
    return KeepAll()


def recompute_every(num_layers: int, **options: Unpack[RecomputeOptions]) -> RecomputeEvery:
    """Return the policy that keeps the input of every ``num_layers``-th layer only."""
    if num_layers is None:
        raise PolicyError("recompute_every needs a whole number of layers, at least 1, got None")
    return RecomputeEvery(num_layers, **options)


def recompute_sqrt(**options: Unpack[RecomputeOptions]) -> RecomputeEvery:
    """Return the policy that recomputes segments of sqrt(L) layers, rounded up ("sqrt").

    Of L layers alike it keeps about sqrt(L) inputs, and in the backward the activations of sqrt(L)
    layers: the least that equal segments need where a layer's activations take as much as its
    input. `planning` finds the best segments for layers as they are.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174), 4.1.
    """
    return RecomputeEvery(None, **options)


def recompute_all(**options: Unpack[RecomputeOptions]) -> RecomputeEvery:
    """Return the policy that keeps each layer's input and nothing else ("full")."""
    return RecomputeEvery(1, **options)
