"""What takes over plain states out of checkpoints: loss scalers, histories, guards.

Each load is tried on an object that has a state already, and a load that was refused must have left
that as it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from tests.fuzzing import Reader
from trainwright.precision import (
    DynamicLossScaler,
    Hysteresis,
    PrecisionError,
    StaticLossScaler,
    UnitLossScaler,
)
from trainwright.precision.health import ScaleHistory
from trainwright.stability_guards import (
    Guard,
    GuardError,
    HaltError,
    MemoryJournal,
    MemorySnapshots,
    Positions,
    Recovery,
    Report,
    all_guards,
    default_guards,
)


class Loading(Protocol):
    """What has a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        ...

    def load_state_dict(self, state_dict: Any) -> None:
        """Take it over."""
        ...


T = TypeVar("T", bound=Loading)


def loads_of(make: Callable[[], T], use: Callable[[T], object]) -> Callable[[bytes], object]:
    """Return what loads a state into one object, from there into another one, and uses that."""

    def read(data: bytes) -> object:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise PrecisionError("no JSON") from error  # which is not the reader's
        into = make()
        before = json.dumps(into.state_dict())
        try:
            into.load_state_dict(value)
        except (PrecisionError, GuardError):
            assert json.dumps(into.state_dict()) == before, "a refused load changed something"
            raise
        loaded = into.state_dict()
        again = make()
        again.load_state_dict(loaded)
        assert json.dumps(again.state_dict()) == json.dumps(loaded)
        return json.dumps(loaded), use(again)

    return read


def _reader(make: Callable[[], T], seeds: list[T], use: Callable[[T], object] = str) -> Reader:
    texts = [json.dumps(seed.state_dict()).encode() for seed in seeds]
    return Reader(loads_of(make, use), texts, (PrecisionError, GuardError))


def dynamic_scalers() -> Reader:
    """Return the loads of dynamic loss scalers."""
    patient = DynamicLossScaler(2.0**10, hysteresis=Hysteresis(3, refills=True), min_scale=0.0)
    seeds = [DynamicLossScaler(8.0), patient]
    return _reader(DynamicLossScaler, seeds, DynamicLossScaler.get_scale)


def fixed_scalers() -> Reader:
    """Return the loads of scalers whose scale stays."""
    seeds: list[Loading] = [StaticLossScaler(8.0), UnitLossScaler()]
    return _reader(lambda: StaticLossScaler(4.0), seeds, Loading.state_dict)


def scale_histories() -> Reader:
    """Return the loads of histories of scales."""
    history = ScaleHistory()
    for step, scale in ((0, 65536.0), (7, 32768.0), (9, 65536.0)):
        history.record(step, {"loss": scale, "layers.0": 1.0 / scale})
    return _reader(ScaleHistory, [history])


class _Source:
    """A reader of batches of two positions each."""

    def __init__(self) -> None:
        self.position = 0

    @property
    def last(self) -> Positions:
        """The batch handed out last."""
        return Positions([(max(self.position - 2, 0), self.position)])

    def seek(self, position: int, left_out: Positions) -> None:
        """Go on from there."""
        self.position = position


def _recovery(guard: Guard, steps: int) -> Recovery:
    source = _Source()
    recovery = Recovery(guard, MemorySnapshots({}, keep=2), source, MemoryJournal())
    recovery.begin(0)
    for step in range(steps):
        source.position += 2
        recovery.judge(Report(step, 5.0 - step / 10, 1.0), step)
    return recovery


def _judge_on(recovery: Recovery) -> object:
    """Judge steps of every kind, as the run that resumed would."""
    found: list[object] = []
    for number, (loss, norm, tokens) in enumerate(_STEPS, start=6):
        try:
            report = Report(number, loss, norm, tokens=tokens)
            found.append((recovery.judge(report, number), recovery.reason))
        except HaltError as error:
            found.append(str(error))
    return found


_STEPS = ((4.0, 1.0, 8), (math.nan, 1.0, 8), (400.0, 9.0, 8), (4.0, 1.0, 0), (3.9, math.inf, 8))


def recoveries() -> Reader:
    """Return the loads of what judges steps, with the states of all its guards."""
    return _of_guards(all_guards())


def default_recoveries() -> Reader:
    """Return the loads of the guards that stand by default; they are small, so damage is dense."""
    return _of_guards(default_guards())


def _of_guards(guards: Guard) -> Reader:
    def make() -> Recovery:
        return _recovery(guards, 0)

    return _reader(make, [make(), _recovery(guards, 6)], _judge_on)


READERS: dict[str, Callable[[], Reader]] = {
    "state of a loss scaler": dynamic_scalers,
    "state of a fixed scale": fixed_scalers,
    "state of a scale history": scale_histories,
    "state of all guards": recoveries,
    "state of default guards": default_recoveries,
}
