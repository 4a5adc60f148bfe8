"""Who gathers and releases units: hooks on modules, or the caller."""

from __future__ import annotations

from typing import Protocol


class UnitDriver(Protocol):
    """What gathers and releases units while the module computes."""

    def begin_step(self) -> None:
        """Forget forwards whose backward never came."""
        ...

    def finish(self) -> None:
        """End what is open, before gradients are reduced."""
        ...

    def reset(self) -> None:
        """Leave what an exception broke off."""
        ...


class CallerDrives:
    """The caller gathers and releases, or nothing is ever released."""

    def begin_step(self) -> None:
        """Nothing to forget."""

    def finish(self) -> None:
        """Nothing to end."""

    def reset(self) -> None:
        """Nothing to leave."""
