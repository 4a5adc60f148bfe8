"""What a loss scaler is, and what it wants of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class SteppableOptimizer(Protocol):
    """What a scaler needs of an optimizer; every ``torch.optim`` optimizer has it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups with the parameters under "params", and their names under "param_names"."""
        ...

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Apply one update from the gradients that the parameters hold."""
        ...


@runtime_checkable
class LossScaler(Protocol):
    """Keeps small gradients above the smallest number of a narrow format.

    It fits PyTorch's loop: ``scale(loss).backward()``, ``unscale_(optimizer)``, clip,
    ``applied = step(optimizer)``, ``update()``. Laws: with finite gradients the loop computes what
    it computes without a scaler; gradients are unscaled exactly once an iteration; a non-finite
    gradient anywhere skips the step everywhere; the state survives ``state_dict``.
    """

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale; every loss of an iteration gets the same scale."""
        ...

    def unscaled(self, value: torch.Tensor) -> torch.Tensor:
        """Return a quantity of the scaled gradients, such as their norm, in true units."""
        ...

    def unscale_(
        self, optimizer: SteppableOptimizer, *, non_finite: torch.Tensor | float | None = None
    ) -> None:
        """Divide the optimizer's gradients by the scale, and note whether all were finite.

        Args:
            optimizer: its parameters' gradients are divided in place.
            non_finite: a count of non-finite gradient elements that all ranks already share
                (0-d); the gradients are then not searched and nothing is communicated.
        """
        ...

    def step(self, optimizer: SteppableOptimizer, *args: Any, **kwargs: Any) -> bool:
        """Step the optimizer unless a gradient was non-finite; return whether it was stepped."""
        ...

    def update(self) -> None:
        """End the iteration: adjust the scale by what its steps met."""
        ...

    def get_scale(self) -> float:
        """Return the current scale."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return settings, scale and counters as plain numbers."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over settings, scale and counters; runs no step."""
        ...
