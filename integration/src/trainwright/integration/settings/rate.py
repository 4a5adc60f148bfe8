"""How the learning rate moves."""

from __future__ import annotations

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import not_negative, share


@attrs.frozen
class RateSettings:
    """The learning rate over the run.

    Args:
        warmup: updates over which it rises; None takes 50, at most a quarter of the steps.
        warmup_fraction: part of the steps over which it rises, instead.

    Raises:
        ConfigError: both are set.
    """

    warmup: int | None = leaf(
        None,
        "updates of rising learning rate (default 50, at most a quarter of all)",
        not_negative,
    )
    warmup_fraction: float | None = leaf(
        None, "part of the steps with rising learning rate, instead of --warmup", share
    )

    def __attrs_post_init__(self) -> None:
        if self.warmup is not None and self.warmup_fraction is not None:
            raise ConfigError(
                f"--warmup {self.warmup} and --warmup-fraction {self.warmup_fraction} say the same "
                "thing twice; leave one out, or set it to none"
            )

    def warmup_steps(self, steps: int) -> int:
        """Return the updates over which the rate rises in a run of so many steps."""
        if self.warmup_fraction is not None:
            return round(self.warmup_fraction * steps)
        return min(50, steps // 4) if self.warmup is None else self.warmup
