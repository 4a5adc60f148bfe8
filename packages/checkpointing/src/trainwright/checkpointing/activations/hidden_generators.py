"""Notices generators that a layer draws from and that nobody can see, at its first run."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class GeneratorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, refuses numbers from generators that would not be replayed.

    Args:
        known: The generators that are.
    """

    def __init__(self, known: Iterable[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = [torch.default_generator, *known]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled units run compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``.

        Raises:
            ReplayError: It draws from a generator that is not known.
        """
        generator = (kwargs or {}).get("generator")
        if isinstance(generator, torch.Generator) and not self._knows(generator):
            raise ReplayError(
                f"{func} draws from a generator that a recomputation "
                "cannot replay, since nothing leads to it; make it an attribute of the module or "
                "an argument, draw by place (trainwright.collectives.random), or keep this layer"
            )
        return func(*args, **(kwargs or {}))

    def _knows(self, generator: torch.Generator) -> bool:
        # Operators are given another object for the same generator; its state tells which one.
        defaults: Any = ()
        if generator.device.type != "cpu":
            module = torch.get_device_module(generator.device)
            defaults = getattr(module, "default_generators", ())
        state = generator.get_state()
        return any(
            known.device == generator.device and torch.equal(known.get_state(), state)
            for known in (*self._known, *defaults)
        )
