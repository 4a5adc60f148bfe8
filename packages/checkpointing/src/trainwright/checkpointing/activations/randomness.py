"""The numbers that a forward draws from generators, to be drawn again by its recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from trainwright.checkpointing.errors import ReplayError

from .reach import reached_from


class Randomness:
    """What one forward drew from PyTorch's global generators and from generators of its own.

    Generators are written only if the forward drew from them. A layer that does not is recomputed
    without touching them, so ranks that are threads of one process, which share the global ones,
    cannot disturb each other.

    Args:
        devices: Where the layer's tensors are; the global generator of the CPU is always watched.
        generators: `torch.Generator`s that the layer holds or is given.
    """

    def __init__(
        self, devices: Iterable[torch.device], generators: Iterable[torch.Generator] = ()
    ) -> None:
        others = {device for device in devices if device.type not in ("cpu", "meta")}
        self._sources = [_global(device) for device in (torch.device("cpu"), *others)]
        for generator in generators:
            self._sources.append(
                _Source("a generator of its own", generator.get_state, generator.set_state)
            )
        self._before = [source.read() for source in self._sources]
        self._after = self._before

    def stop_watching(self) -> None:
        """Note that the forward has ended."""
        self._after = [source.read() for source in self._sources]

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run the block on the numbers that the forward drew; leave the generators as they are.

        Raises:
            ReplayError: The block ran to its end and drew other numbers than the forward did.
        """
        drawn = [
            (source, before, after)
            for source, before, after in zip(self._sources, self._before, self._after, strict=True)
            if not torch.equal(before, after)
        ]
        outside = [source.read() for source, _, _ in drawn]
        for source, before, _ in drawn:
            source.write(before)
        try:
            yield
            for source, _, after in drawn:
                if not torch.equal(source.read(), after):
                    raise ReplayError(
                        f"the recomputation drew another amount from {source.name} than the "
                        "forward; draw by place (trainwright.collectives.random) or keep this layer"
                    )
        finally:
            for (source, _, _), state in zip(drawn, outside, strict=True):
                source.write(state)


def generators_of(function: object, values: Iterable[object]) -> list[torch.Generator]:
    """Return the generators that a function can be seen to draw from.

    Those are attributes of its modules, what it closes over or is bound to, and arguments.
    """
    found: dict[int, torch.Generator] = {}
    for value in (*reached_from(function), *values):
        held = vars(value).values() if isinstance(value, nn.Module) else ()
        for each in (value, *held):
            if isinstance(each, torch.Generator) and each is not torch.default_generator:
                found[id(each)] = each
    return list(found.values())


@attrs.frozen(eq=False)
class _Source:
    """A generator: what errors call it, and how its state is read and written."""

    name: str
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], object]


def _global(device: torch.device) -> _Source:
    name = "torch's global generator"
    if device.type == "cpu":
        return _Source(name, torch.get_rng_state, torch.set_rng_state)
    module: Any = torch.get_device_module(device)
    return _Source(
        f"{name} of {device}",
        functools.partial(module.get_rng_state, device),
        functools.partial(module.set_rng_state, device=device),
    )
