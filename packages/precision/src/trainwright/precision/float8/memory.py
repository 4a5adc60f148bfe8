"""What is remembered of one tensor's magnitudes from step to step."""

from __future__ import annotations

import attrs
import torch


@attrs.define(eq=False)
class AmaxMemory:
    """The scale of a tensor that was found in earlier steps, and what this step has met.

    Args:
        scale: what the tensor is multiplied by, 0-d float32; means nothing while blank.
        is_blank: no step in the history met anything but zeros: the tensor at hand has to say how
            large it is.
        pending: the largest magnitude met since the last step ended, 0-d float32; None: nothing.
        num_steps: steps ended so far.
    """

    scale: torch.Tensor = attrs.field(factory=lambda: torch.ones(()))
    is_blank: bool = True
    pending: torch.Tensor | None = None
    num_steps: int = 0

    def record(self, amax: torch.Tensor) -> None:
        """Take note of a magnitude; NaN counts as infinite, so that no maximum hides it."""
        met = amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)
        self.pending = met if self.pending is None else torch.maximum(self.pending, met)
