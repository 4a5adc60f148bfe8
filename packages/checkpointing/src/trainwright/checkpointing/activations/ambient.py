"""State around a layer that its output depends on, captured in the forward, brought back later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

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


def capture_numerics() -> Reenter:
    """Capture the flags of the process that change what kernels compute.

    They are whether algorithms must be deterministic and the precision of float32 products; they
    are set for a recomputation only where they have changed since.
    """
    wanted = _numerics()

    @contextmanager
    def reenter() -> Iterator[None]:
        now = _numerics()
        if now == wanted:
            yield
            return
        _set_numerics(wanted)
        try:
            yield
        finally:
            _set_numerics(now)

    return reenter


def _numerics() -> tuple[bool, bool, str]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _set_numerics(flags: tuple[bool, bool, str]) -> None:
    torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])
    torch.set_float32_matmul_precision(flags[2])


def _active_modes() -> list[TorchFunctionMode]:
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes
