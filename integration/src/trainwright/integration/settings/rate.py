"""How the learning rate and the weight decay move."""

from __future__ import annotations

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.integration.foreign_rates import foreign_rate
from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import not_negative, one_of, option, positive, share

FALLING = ("linear", "cosine", "polynomial", "wsd")
"""Schedules that fall to a floor."""
LR_SCHEDULES = ("constant", "inverse-sqrt", *FALLING)
DECAY_SHAPES = ("linear", "cosine", "1-sqrt")

_USERS = {
    "lr_floor": (*FALLING, "inverse-sqrt"),
    "decay_steps": FALLING,
    "decay_fraction": FALLING,
    "decay_shape": ("wsd",),
    "decay_power": ("polynomial",),
}


@attrs.frozen
class RateSettings:
    """The learning rate over the run, and the weight decay. Both follow applied updates.

    Args:
        lr_schedule: one of `LR_SCHEDULES`; each begins with the rise.
        warmup: updates over which it rises; None takes 50, at most a quarter of the updates.
        warmup_fraction: part of the updates over which it rises, instead.
        decay_steps: updates of the fall: the last ones of the run with ``wsd``, those behind the
            rise otherwise, which may be more than the run has. None: a tenth of the run with
            ``wsd``, all behind the rise otherwise.
        decay_fraction: part of the updates that the fall takes, instead.
        decay_shape: of the fall of ``wsd``, one of `DECAY_SHAPES`; None takes ``1-sqrt``.
        decay_power: to which power ``polynomial`` raises what is left of the fall; None takes 2.
        lr_floor: share of the peak that is held after the fall; None takes 0.1, and none with
            ``inverse-sqrt``.
        weight_decay_end: weight decay at the end of the run, to which it moves in a straight line
            from the first update on; None keeps it.
        scheduler: a schedule of DeepSpeed's as JSON, with a rise and a fall of its own, in place of
            all of these but the weight decay; see `foreign_rate`.

    Raises:
        ConfigError: two settings say the same thing, or one has no effect with the schedule.
    """

    lr_schedule: str = leaf("cosine", f"one of {', '.join(LR_SCHEDULES)}", one_of(LR_SCHEDULES))
    warmup: int | None = leaf(
        None,
        "updates of rising learning rate (default 50, at most a quarter of all)",
        not_negative,
    )
    warmup_fraction: float | None = leaf(
        None, "part of the updates with rising learning rate, instead of --warmup", share
    )
    decay_steps: int | None = leaf(
        None, "updates of falling learning rate (default: wsd a tenth, others the rest)", positive
    )
    decay_fraction: float | None = leaf(
        None, "part of the updates with falling learning rate, instead of --decay-steps", share
    )
    decay_shape: str | None = leaf(
        None, f"how wsd falls: {', '.join(DECAY_SHAPES)} (default 1-sqrt)", one_of(DECAY_SHAPES)
    )
    decay_power: float | None = leaf(None, "of the polynomial (default 2)", positive)
    lr_floor: float | None = leaf(
        None, "share of the peak that is held after the fall (default 0.1)", share
    )
    weight_decay_end: float | None = leaf(
        None, "weight decay at the end of the run (default: as at its beginning)", not_negative
    )
    scheduler: str | None = leaf(
        None, 'or DeepSpeed\'s: {"type": …, "params": …} as JSON, such as WarmupLR or OneCycle'
    )

    def __attrs_post_init__(self) -> None:
        for one, other in (("warmup", "warmup_fraction"), ("decay_steps", "decay_fraction")):
            number, part = getattr(self, one), getattr(self, other)
            if number is not None and part is not None:
                raise ConfigError(
                    f"{option(one)} {number} and {option(other)} {part} say the same thing twice; "
                    "leave one out, or set it to none"
                )
        for name, users in _USERS.items():
            if getattr(self, name) is not None and self.lr_schedule not in users:
                raise ConfigError(
                    f"{option(name)} {getattr(self, name)} has no effect with --lr-schedule "
                    f"{self.lr_schedule}; it is for {', '.join(users)}"
                )
        if self.scheduler is not None:
            self._check_alone()

    def warmup_steps(self, steps: int) -> int:
        """Return the updates over which the rate rises in a run of so many updates."""
        if self.warmup_fraction is not None:
            return round(self.warmup_fraction * steps)
        return min(50, steps // 4) if self.warmup is None else self.warmup

    def falling_steps(self, steps: int) -> int:
        """Return the updates over which the rate falls in a run of so many updates."""
        if self.decay_fraction is not None:
            return round(self.decay_fraction * steps)
        if self.decay_steps is not None:
            return self.decay_steps
        rest = steps - self.warmup_steps(steps)
        return min(rest, max(1, steps // 10)) if self.lr_schedule == "wsd" else rest

    def _check_alone(self) -> None:
        foreign_rate(str(self.scheduler))
        usual = {field.name: field.default for field in attrs.fields(RateSettings)}
        for name in ("lr_schedule", "warmup", "warmup_fraction", *_USERS):
            value = getattr(self, name)
            if value != usual[name]:
                raise ConfigError(
                    f"{option(name)} {value} has no effect with --scheduler, which has a rise and "
                    "a fall of its own; leave one out"
                )
