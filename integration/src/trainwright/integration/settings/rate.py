"""How the learning rate moves."""

from __future__ import annotations

import attrs

from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import not_negative


@attrs.frozen
class RateSettings:
    """The learning rate over the run.

    Args:
        warmup: updates over which it rises; None takes 50, at most a quarter of the steps.
    """

    warmup: int | None = leaf(
        None,
        "updates of rising learning rate (default 50, at most a quarter of all)",
        not_negative,
    )

    def warmup_steps(self, steps: int) -> int:
        """Return the updates over which the rate rises in a run of so many steps."""
        return min(50, steps // 4) if self.warmup is None else self.warmup
