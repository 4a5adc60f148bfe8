"""Who gathers and releases units: hooks on modules, or the caller."""

from __future__ import annotations

from typing import Protocol


class UnitDriver(Protocol):
    """What gathers and releases units while the module computes."""

    def begin_step(self) -> None:
        """Forget forwards whose backward never came."""
        ...

    def catch_up(self) -> None:
        """End what is open and join what other ranks still run, before gradients are reduced."""
        ...

    def compare(self) -> None:
        """Raise on every rank if they have run different passes."""
        ...

    def reset(self) -> None:
        """Leave what an exception broke off."""
        ...

    def end_pass(self) -> None:
        """End what is open on this rank, before others gather or release units."""
        ...

    def relearn_order(self) -> None:
        """Find out anew in which order ranks need units."""
        ...


class CallerDrives:
    """The caller gathers and releases, or nothing is ever released."""

    def begin_step(self) -> None:
        """Nothing to forget."""

    def catch_up(self) -> None:
        """Nothing to end."""

    def compare(self) -> None:
        """Nothing to compare."""

    def end_pass(self) -> None:
        """Nothing to end."""

    def relearn_order(self) -> None:
        """No order to learn."""

    def reset(self) -> None:
        """Nothing to leave."""
