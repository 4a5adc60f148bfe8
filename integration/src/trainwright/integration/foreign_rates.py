"""DeepSpeed's learning-rate schedules: pure functions of the applied updates before an update.

There a schedule is stepped after each update, and says 0 or its least rate until then: update k,
counted from 0, has the rate of iteration k - 1. Skipped steps do not count.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from trainwright.integration.errors import ConfigError

WARMUP_TYPES = ("log", "linear")


class ForeignRate(Protocol):
    """A schedule with the numbers that it was given."""

    def at(self, update: int, lr: float, steps: int) -> float:
        """Return the rate of an update, from the optimizer's rate and the steps of the run."""
        ...


def foreign_rate(text: str) -> ForeignRate:
    """Return the schedule that a JSON object names, such as ``{"type": "WarmupLR", "params": {}}``.

    Raises:
        ConfigError: there is no such schedule (the nearest is named), or one of its parameters is
            unknown, missing or out of its range.
    """
    try:
        block = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--scheduler {text}: cannot be read as JSON: {error}") from error
    if not isinstance(block, Mapping) or not block.keys() <= {"type", "params"}:
        raise ConfigError(f'--scheduler must be {{"type": …, "params": {{…}}}}, got {text}')
    kind, params = block.get("type"), block.get("params", {})
    made = FOREIGN_RATES.get(str(kind))
    if made is None:
        raise ConfigError(f"--scheduler: no schedule {kind!r}{near(str(kind), FOREIGN_RATES)}")
    if not isinstance(params, Mapping):
        raise ConfigError(f"--scheduler: {kind}'s params must be an object, got {params!r}")
    known = {field.name: field for field in attrs.fields(made)}
    for name in params:
        if name not in known:
            raise ConfigError(f"--scheduler: {kind} has no {name!r}{near(name, known)}")
    missing = [
        name for name, f in known.items() if f.default is attrs.NOTHING and name not in params
    ]
    if missing:
        raise ConfigError(f"--scheduler: {kind} needs {', '.join(missing)}")
    built: ForeignRate = made(**params)
    return built


def near(name: str, known: Mapping[str, object]) -> str:
    """Return the part of a message that asks for the nearest name, if one is near."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; known are {', '.join(known)}"


def _number(least: float) -> Callable[[Any, Any, Any], None]:
    def check(owner: Any, field: attrs.Attribute[Any], value: Any) -> None:
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if not right or not least <= value <= sys.float_info.max:
            raise ConfigError(
                f"--scheduler: {type(owner).__name__}'s {field.name} must be a finite number from "
                f"{least}, got {value!r}"
            )

    return check


def _whole(least: int) -> Callable[[Any, Any, Any], None]:
    def check(owner: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
            raise ConfigError(
                f"--scheduler: {type(owner).__name__}'s {field.name} must be a whole number from "
                f"{least}, got {value!r}"
            )

    return check


def _truth(owner: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(
            f"--scheduler: {type(owner).__name__}'s {field.name} must be true or false, got "
            f"{value!r}"
        )


def _type(owner: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if value not in WARMUP_TYPES:
        raise ConfigError(
            f"--scheduler: {type(owner).__name__}'s {field.name} must be one of "
            f"{', '.join(WARMUP_TYPES)}, got {value!r}"
        )


def _risen(iteration: int, length: int, kind: str) -> float:
    """Return the part of the rise that is done; its length is at least 2."""
    if iteration >= max(2, length):
        return 1.0
    if kind == "log":
        return math.log(iteration + 1) / math.log(max(2, length))
    return iteration / max(2, length)


_optional: Any = attrs.validators.optional


@attrs.frozen
class WarmupLR:
    """Rises to the greatest rate, None for the optimizer's, and stays."""

    warmup_min_lr: float = attrs.field(default=0.0, validator=_number(0))
    warmup_max_lr: float | None = attrs.field(default=None, validator=_optional(_number(0)))
    warmup_num_steps: int = attrs.field(default=1000, validator=_whole(1))
    warmup_type: str = attrs.field(default="log", validator=_type)

    def at(self, update: int, lr: float, steps: int) -> float:
        """Return the rate of an update."""
        if update == 0:
            return self.warmup_min_lr
        risen = _risen(update - 1, self.warmup_num_steps, self.warmup_type)
        return _between(self.warmup_min_lr, _peak(self.warmup_max_lr, lr), risen)


@attrs.frozen
class WarmupDecayLR:
    """Rises, then falls in a straight line to 0 at the end; None takes the steps of the run."""

    total_num_steps: int | None = attrs.field(validator=_optional(_whole(1)))
    warmup_min_lr: float = attrs.field(default=0.0, validator=_number(0))
    warmup_max_lr: float | None = attrs.field(default=0.001, validator=_optional(_number(0)))
    warmup_num_steps: int = attrs.field(default=1000, validator=_whole(1))
    warmup_type: str = attrs.field(default="log", validator=_type)

    def at(self, update: int, lr: float, steps: int) -> float:
        """Return the rate of an update."""
        if update == 0:
            return self.warmup_min_lr
        total, rise = self.total_num_steps or steps, max(2, self.warmup_num_steps)
        if update - 1 < rise:
            part = _risen(update - 1, rise, self.warmup_type)
        else:
            part = max(0.0, (total - (update - 1)) / max(1, total - rise))
        return _between(self.warmup_min_lr, _peak(self.warmup_max_lr, lr), part)


@attrs.frozen
class WarmupCosineLR:
    """Rises to the optimizer's rate, then falls along half a cosine to a share of it."""

    total_num_steps: int | None = attrs.field(validator=_optional(_whole(1)))
    warmup_min_ratio: float = attrs.field(default=0.0, validator=_number(0))
    warmup_num_steps: int = attrs.field(default=1000, validator=_whole(1))
    cos_min_ratio: float = attrs.field(default=1e-4, validator=_number(0))
    warmup_type: str = attrs.field(default="log", validator=_type)

    def at(self, update: int, lr: float, steps: int) -> float:
        """Return the rate of an update."""
        if update == 0:
            return 0.0
        total, rise = self.total_num_steps or steps, max(2, self.warmup_num_steps)
        if update - 1 < rise:
            risen = _risen(update - 1, rise, self.warmup_type)
            return lr * _between(self.warmup_min_ratio, 1.0, risen)
        fallen = min(1.0, (update - rise) / max(1, total - rise))
        return lr * _between(self.cos_min_ratio, 1.0, (1.0 + math.cos(math.pi * fallen)) / 2.0)


@attrs.frozen
class OneCycle:
    """Rises and falls between two rates, in stairs if asked for, then decays from the lower one.

    Cycles of the momentum are refused: set ``cycle_momentum`` to false.
    """

    cycle_min_lr: float = attrs.field(validator=_number(0))
    cycle_max_lr: float = attrs.field(validator=_number(0))
    decay_lr_rate: float = attrs.field(default=0.0, validator=_number(0))
    cycle_first_step_size: int = attrs.field(default=2000, validator=_whole(1))
    cycle_second_step_size: int | None = attrs.field(default=None, validator=_optional(_whole(1)))
    cycle_first_stair_count: int = attrs.field(default=0, validator=_whole(0))
    cycle_second_stair_count: int | None = attrs.field(default=None, validator=_optional(_whole(0)))
    decay_step_size: int = attrs.field(default=0, validator=_whole(0))
    cycle_momentum: bool = attrs.field(default=True)

    @cycle_momentum.validator
    def _check_momentum(self, _: object, value: object) -> None:
        if value is not False:
            raise ConfigError(
                f"--scheduler: OneCycle's cycle_momentum={value!r} is not available, and true "
                "where it is left out; set it to false"
            )

    def at(self, update: int, lr: float, steps: int) -> float:
        """Return the rate of an update."""
        first = self.cycle_first_step_size
        second = self.cycle_second_step_size or first
        if update <= first + second:
            return _between(self.cycle_min_lr, self.cycle_max_lr, self._height(update, second))
        if not self.decay_step_size or not self.decay_lr_rate:
            return self.cycle_min_lr
        decayed = (update - first - second) / self.decay_step_size
        return self.cycle_min_lr / (1.0 + self.decay_lr_rate * decayed)

    def _height(self, update: int, second: int) -> float:
        first, stairs = self.cycle_first_step_size, self.cycle_first_stair_count
        done, length = update, first
        if update > first:
            done, length = first + second - update, second
            if self.cycle_second_stair_count is not None:
                stairs = self.cycle_second_stair_count
        return math.floor(done * stairs / length) / stairs if stairs else done / length


@attrs.frozen
class LRRangeTest:
    """Grows without end, to see from which rate on training breaks."""

    lr_range_test_min_lr: float = attrs.field(default=1e-3, validator=_number(0))
    lr_range_test_step_size: int = attrs.field(default=2000, validator=_whole(1))
    lr_range_test_step_rate: float = attrs.field(default=1.0, validator=_number(0))
    lr_range_test_staircase: bool = attrs.field(default=False, validator=_truth)

    def at(self, update: int, lr: float, steps: int) -> float:
        """Return the rate of an update."""
        done = update / self.lr_range_test_step_size
        stairs = math.floor(done) if self.lr_range_test_staircase else done
        return self.lr_range_test_min_lr * (1.0 + self.lr_range_test_step_rate * stairs)


def _peak(given: float | None, lr: float) -> float:
    return lr if given is None else given  # which may be 0


def _between(least: float, greatest: float, part: float) -> float:
    return least + (greatest - least) * part


FOREIGN_RATES: Mapping[str, Any] = {
    made.__name__: made for made in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
