"""Activation policies: which layers of a stack are recomputed in the backward."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from trainwright.checkpointing.errors import NotAvailableYetError, PolicyError
from trainwright.checkpointing.protocol import Capture, LayerRunner

from .recompute import Recomputed, as_captures

_PLANNED = ("sqrt", "selective", "budget", "offload", "compress")


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
        num_layers: Layers that are recomputed together, at least 1.
        captures: As in `Recomputed`.
        preserve_rng_state: As in `Recomputed`.
        early_stop: As in `Recomputed`.

    Raises:
        PolicyError: ``num_layers`` is not a positive integer.
    """

    num_layers: int = attrs.field()
    captures: tuple[Capture, ...] = attrs.field(default=(), converter=as_captures, kw_only=True)
    preserve_rng_state: bool = attrs.field(default=True, kw_only=True)
    early_stop: bool = attrs.field(default=True, kw_only=True)

    @num_layers.validator
    def _check_num_layers(self, attribute: object, value: object) -> None:
        if type(value) is not int or value < 1:
            raise PolicyError(
                f"recompute_every needs a whole number of layers, at least 1, got {value!r}; "
                "1 recomputes each layer alone, keep_all() recomputes none"
            )

    def __call__(self, layers: Iterable[nn.Module], hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the last layer, bitwise that of `KeepAll`."""
        stack = list(layers)
        for first in range(0, len(stack), self.num_layers):
            segment = Recomputed(
                _Segment(tuple(stack[first : first + self.num_layers]), first),
                captures=self.captures,
                preserve_rng_state=self.preserve_rng_state,
                early_stop=self.early_stop,
            )
            hidden = segment(hidden, *args, **kwargs)
        return hidden


def keep_all() -> KeepAll:
    """Return the policy that recomputes nothing."""
    return KeepAll()


def recompute_every(
    num_layers: int,
    *,
    captures: Sequence[Capture] = (),
    preserve_rng_state: bool = True,
    early_stop: bool = True,
) -> RecomputeEvery:
    """Return the policy that keeps the input of every ``num_layers``-th layer only."""
    return RecomputeEvery(
        num_layers,
        captures=captures,
        preserve_rng_state=preserve_rng_state,
        early_stop=early_stop,
    )


def recompute_all(
    *,
    captures: Sequence[Capture] = (),
    preserve_rng_state: bool = True,
    early_stop: bool = True,
) -> RecomputeEvery:
    """Return the policy that keeps each layer's input and nothing else ("full")."""
    return recompute_every(
        1, captures=captures, preserve_rng_state=preserve_rng_state, early_stop=early_stop
    )


def parse_policy(
    text: str,
    *,
    captures: Sequence[Capture] = (),
    preserve_rng_state: bool = True,
    early_stop: bool = True,
) -> LayerRunner:
    """Return the policy that ``text`` names: ``none``, ``full`` or ``every-K``.

    Raises:
        PolicyError: There is no such policy.
        NotAvailableYetError: The policy is planned but not built.
    """
    if text == "none":
        return keep_all()
    every = re.fullmatch(r"every-(\d{1,9})", text, re.ASCII)
    if text == "full" or every:
        return recompute_every(
            int(every[1]) if every else 1,
            captures=captures,
            preserve_rng_state=preserve_rng_state,
            early_stop=early_stop,
        )
    if text.split(":")[0] in _PLANNED:
        raise NotAvailableYetError(
            f"recomputation {text!r} is not available yet; use none, full or every-K"
        )
    near = difflib.get_close_matches(text, ["none", "full", "every-4", *_PLANNED], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise PolicyError(f"recomputation must be none, full or every-K (K >= 1), got {text!r}{hint}")


@attrs.frozen(eq=False)
class _Segment:
    """Layers that are recomputed together."""

    layers: tuple[nn.Module, ...]
    first: int

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return KeepAll()(self.layers, hidden, *args, **kwargs)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, layer in enumerate(self.layers, self.first):
            if isinstance(layer, nn.Module):
                for name, parameter in layer.named_parameters():
                    yield f"{number}.{name}", parameter
