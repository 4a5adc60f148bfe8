"""What a function can be seen to make use of: modules, and what it closes over."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import attrs
from torch import nn

from trainwright.checkpointing.protocol import LayerRunner


@attrs.frozen(eq=False)
class Segment:
    """Layers that are recomputed together, called one after the other.

    Args:
        layers: In the order in which they run.
        first: The number of the first one, for messages.
        runner: Runs them; None keeps all.
    """

    layers: tuple[nn.Module, ...]
    first: int
    runner: LayerRunner | None = None

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the last layer."""
        if self.runner is not None:
            return self.runner(self.layers, hidden, *args, **kwargs)
        for layer in self.layers:
            hidden = layer(hidden, *args, **kwargs)
        return hidden


def reached_from(function: object) -> Iterator[object]:
    """Yield modules with all modules in them, and other values, each once, in order.

    They are found through closures, bound methods, `functools.partial` and segments of layers.
    """
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        waiting += reversed(list(_next_to(value)))


def _next_to(value: object) -> Iterator[object]:
    if isinstance(value, nn.Module):
        yield from value.children()
    elif isinstance(value, Segment):
        yield from value.layers
    elif isinstance(value, functools.partial):
        yield value.func
        yield from value.args
        yield from value.keywords.values()
    elif isinstance(value, MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                yield cell.cell_contents
