"""What else a person's own training has that a checkpoint must hold."""

from __future__ import annotations

from typing import Any, Protocol


class Stateful(Protocol):
    """What gives its state as nested dictionaries of tensors and plain values, and takes it back.

    PyTorch's schedules and gradient scaler do, and trainwright's loss scalers.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Go on from a state."""
        ...
