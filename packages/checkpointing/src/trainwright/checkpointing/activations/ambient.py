"""State around a layer that its output depends on, captured in the forward, brought back later."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

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


def _active_modes() -> list[TorchFunctionMode]:
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes
