"""Loss scales that never change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from trainwright.collectives import Communicator
from trainwright.precision.errors import PrecisionError
from trainwright.precision.iteration import ScalerInALoop


@final
class StaticLossScaler(ScalerInALoop):
    """A scale that never changes; a step with non-finite gradients is still skipped.

    Args:
        scale: what losses are multiplied by.
        communicator: the ranks that decide together; None where this process is alone.

    Raises:
        PrecisionError: the scale is not positive and finite.
    """

    def __init__(self, scale: float, *, communicator: Communicator | None = None) -> None:
        super().__init__(scale, communicator, ())


@final
class UnitLossScaler(ScalerInALoop):
    """No scaling: losses and gradients pass unchanged, so that one loop serves every dtype.

    A step with non-finite gradients is skipped all the same, in any dtype, and all ranks agree.

    Args:
        communicator: the ranks that decide together; None where this process is alone.
    """

    _allow_float16 = True

    def __init__(self, *, communicator: Communicator | None = None) -> None:
        super().__init__(1.0, communicator, ())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the counters.

        Raises:
            PrecisionError: the state is one of a scaler whose scale is not 1.
        """
        if isinstance(state_dict, Mapping) and state_dict.get("scale", 1.0) != 1.0:
            raise PrecisionError(
                f"the state holds scale={state_dict['scale']}, but a UnitLossScaler's is 1; "
                "resume with the scaler that was saved"
            )
        super().load_state_dict(state_dict)

    def _times_scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss
