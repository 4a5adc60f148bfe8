"""Learning rate and weight decay as functions of applied updates, chosen once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.foreign_rates import foreign_rate
from trainwright.integration.settings import RateSettings
from trainwright.stability_guards import (
    GuardError,
    InverseSqrt,
    Rates,
    Transition,
    constant,
    decay_setter,
    half_cosine,
    linear,
    one_minus_sqrt,
    polynomial,
    straight,
    warmup_cosine,
    warmup_stable_decay,
)

FLOOR_SHARE = 0.1
"""Where nobody says otherwise the learning rate falls to this share of its peak."""
POWER = 2.0

_SHAPES = {"linear": straight, "cosine": half_cosine, "1-sqrt": one_minus_sqrt}


def learning_rate(rate: RateSettings, peak: float, steps: int) -> Callable[[int], float]:
    """Return the schedule of the learning rate in a run of so many updates.

    Raises:
        ConfigError: rise and fall are longer than the run.
    """
    if rate.scheduler is not None:
        return partial(foreign_rate(rate.scheduler).at, lr=peak, steps=steps)
    rise, fall = rate.warmup_steps(steps), rate.falling_steps(steps)
    floor = peak * (FLOOR_SHARE if rate.lr_floor is None else rate.lr_floor)
    if rise > steps:
        raise ConfigError(
            f"--warmup {rise} must be at most --steps {steps}, the last update of the run"
        )
    if rate.lr_schedule == "wsd" and rise + fall > steps:
        raise ConfigError(
            f"--warmup {rise} and --decay-steps {fall} must be at most --steps {steps} together; "
            f"--decay-steps up to {steps - rise} works"
        )
    makers: dict[str, Callable[[], Rates]] = {
        "constant": lambda: constant(peak, rise),
        "inverse-sqrt": lambda: InverseSqrt(peak, rise, floor=peak * (rate.lr_floor or 0.0)),
        "linear": lambda: linear(peak, rise, rise + fall, floor),
        "cosine": lambda: warmup_cosine(peak, rise, rise + fall, floor),
        "polynomial": lambda: polynomial(
            peak, rise, rise + fall, floor, power=rate.decay_power or POWER
        ),
        "wsd": lambda: warmup_stable_decay(
            peak, rise, steps, fall, floor, shape=_SHAPES[rate.decay_shape or "1-sqrt"]
        ),
    }
    try:
        return makers[rate.lr_schedule]()
    except GuardError as error:
        raise ConfigError(f"--lr-schedule {rate.lr_schedule}: {error}") from error


def keep_decay(update: int) -> None:
    """Leave the weight decay as it is."""


def decay_mover(config: RunConfig, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    """Return what sets the weight decay of the update with a number, before it is made."""
    end = config.rate.weight_decay_end
    if end is None:
        return keep_decay
    moving = Transition(config.optimizer.decay, end, 0, max(config.steps - 1, 0))
    set_decay = decay_setter(optimizer)

    def move(update: int) -> None:
        set_decay(moving(update))

    return move


def check_rates(config: RunConfig) -> None:
    """Check that the schedules fit the run.

    Raises:
        ConfigError: rise and fall are longer than the run, or there is no weight decay to move.
    """
    learning_rate(config.rate, config.optimizer.lr, config.steps)
    end = config.rate.weight_decay_end
    if end is not None and config.optimizer.decay == 0.0:
        raise ConfigError(
            f"--weight-decay-end {end} needs a --weight-decay above 0 to begin with: which weights "
            "decay is told by it"
        )
