"""State around a layer that its output depends on, captured in the forward, brought back later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from trainwright.checkpointing.errors import ReplayError
from trainwright.checkpointing.protocol import Reenter


def capture_function_modes() -> Reenter:
    """Capture the `TorchFunctionMode`s that are active, so that a recomputation runs under them.

    A mode that is still active when the backward runs is not entered a second time. The device
    context of ``with torch.device(...)`` is left to PyTorch, which brings it back itself.
    """
    modes = [mode for mode in _active_modes() if not isinstance(mode, DeviceContext)]

    def reenter() -> AbstractContextManager[object]:
        active = _active_modes()
        stack = ExitStack()
        for mode in modes:
            if not any(mode is other for other in active):
                stack.enter_context(mode)
        return stack

    return reenter


class GlobalRandomness:
    """What one forward drew from PyTorch's global generators, to be drawn again.

    The generators are written only if the forward drew from them. A layer that does not is
    recomputed without touching them, so ranks that are threads of one process, which share these
    generators, cannot disturb each other.

    Args:
        devices: Where the layer's tensors are; the CPU is always among them.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        others = {device for device in devices if device.type not in ("cpu", "meta")}
        self._devices = [torch.device("cpu"), *others]
        self._before = self._read()
        self._after = self._before

    def stop_watching(self) -> None:
        """Note that the forward has ended."""
        self._after = self._read()

    @property
    def drawn(self) -> bool:
        """Whether the forward drew from a global generator."""
        return not _equal(self._before, self._after)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run the block on the numbers that the forward drew; leave the generators as they are.

        Raises:
            ReplayError: The block ran to its end and drew other numbers than the forward did.
        """
        if not self.drawn:
            yield
            return
        outside = self._read()
        self._write(self._before)
        try:
            yield
            if not _equal(self._read(), self._after):
                raise ReplayError(
                    "the recomputation drew another amount from torch's global generator than the "
                    "forward; draw by place (trainwright.collectives.random) or keep this layer"
                )
        finally:
            self._write(outside)

    def _read(self) -> list[torch.Tensor]:
        return [_read_generator(device) for device in self._devices]

    def _write(self, states: list[torch.Tensor]) -> None:
        for device, state in zip(self._devices, states, strict=True):
            _write_generator(device, state)


def _active_modes() -> list[TorchFunctionMode]:
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _read_generator(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _write_generator(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
