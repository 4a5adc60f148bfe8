"""Notices generators that a layer draws from and that nobody can see, at its first run."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainwright.checkpointing.errors import ReplayError


class Watched:
    """Which functions have been watched already: one run of each is."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def is_new(self, functions: Iterable[object]) -> bool:
        """Return whether one of the functions has not been seen, and remember all."""
        found = False
        for function in functions:
            try:
                if function not in self._known:
                    self._known.add(function)
                    found = True
            except TypeError:  # it can be neither compared nor referred to weakly
                found = True
        return found


class GeneratorWatch(TorchFunctionMode):
    """While active, refuses numbers from generators that would not be replayed.

    Args:
        known: The generators that are.
    """

    def __init__(self, known: Iterable[torch.Generator]) -> None:
        super().__init__()
        self._known = [torch.default_generator, *known]

    def __torch_function__(
        self,
        func: Any,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``.

        Raises:
            ReplayError: It draws from a generator that is not known.
        """
        generator = (kwargs or {}).get("generator")
        if isinstance(generator, torch.Generator) and not self._knows(generator):
            raise ReplayError(
                f"{getattr(func, '__name__', func)} draws from a generator that a recomputation "
                "cannot replay, since nothing leads to it; make it an attribute of the module or "
                "an argument, draw by place (trainwright.collectives.random), or keep this layer"
            )
        return func(*args, **(kwargs or {}))

    def _knows(self, generator: torch.Generator) -> bool:
        if any(generator is known for known in self._known):
            return True
        if generator.device.type == "cpu":
            return False
        defaults = getattr(torch.get_device_module(generator.device), "default_generators", ())
        return any(generator is default for default in defaults)
