"""Made-up curves of training runs, healthy ones and ones with a fault, to tune guards on.

What a guard promises is measured on these: how often it cries at a healthy run and how long it
takes to see a fault. Everything follows from the seed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.protocol import Report

Values = NDArray[np.float64]


class Fault(enum.Enum):
    """What goes wrong in a curve."""

    NON_FINITE = "non-finite"
    """One step's loss, norm or gradient elements are infinite or NaN."""
    SPIKE = "spike"
    """Loss and norm jump and come back within 1 to 30 steps."""
    DIVERGENCE = "divergence"
    """The loss grows without end, or jumps to that of a model that knows nothing, and stays."""
    STALL = "stall"
    """The loss stays where it is, but for its noise."""


@attrs.frozen
class Event:
    """Something that happens to healthy runs too, such as a restart."""

    step: int
    kind: str
    size: float


@attrs.frozen(eq=False)
class Curve:
    """The reports of a run.

    Args:
        loss: observed loss of each step, float64 [steps].
        norm: observed gradient norm, float64 [steps].
        level: the loss without its noise, float64 [steps].
        non_finite: bad gradient elements of each step, int64 [steps].
        events: what happened, in order.
        fault: what goes wrong, if anything does.
        onset: first step of the fault; the number of steps where there is none.
        evident: first step at which the fault must count as visible: that of the onset, and of a
            divergence the one at which the level is 5% above its minimum since then.
    """

    loss: Values
    norm: Values
    level: Values
    non_finite: NDArray[np.int64]
    events: tuple[Event, ...]
    fault: Fault | None = None
    onset: int = 0
    evident: int = 0

    def __len__(self) -> int:
        return len(self.loss)

    def reports(self) -> Iterator[Report]:
        """Yield what guards see of each step."""
        rows = zip(self.loss.tolist(), self.norm.tolist(), self.non_finite.tolist(), strict=True)
        for step, (loss, norm, bad) in enumerate(rows):
            yield Report(step=step, loss=loss, norm=norm, non_finite=bad)


def healthy(seed: int, steps: int, *, horizon: int = 100_000) -> Curve:
    """Return a run in which nothing goes wrong, though much happens.

    The loss falls from that of the uniform guess by a power law. Its noise is relative, of scale
    0.3% to 1.2%, autocorrelated (lag one, up to 0.8), its innovations Student's t of 3 degrees of
    freedom, on top of a slow Gaussian wander; that of the norm is of scale 5% to 15%, and its tails
    do not depend on the loss's: a step in which both are far out is no healthy one. Every 100,000
    steps see up to three drops of the learning rate (the loss falls by up to 4%), one to four
    changes of the data mixture (-10% to +20% at once, part of which stays; norm by a factor 0.8 to
    1.4), two to six restarts (the loss starts up to 8% higher, the norm up to 1.6 times) and with
    every second seed a batch that doubles twice (until then noise is up to twice as large).

    Args:
        seed: of everything random.
        steps: length.
        horizon: steps of the whole run, of which these are the first.

    Raises:
        GuardError: no step, or more than the horizon.
    """
    if not 1 <= steps <= horizon:
        raise GuardError(f"steps must be between 1 and horizon={horizon}, got {steps}")
    random = np.random.default_rng([0x677561726473, seed])
    time = np.arange(steps, dtype=np.float64)
    level = _falling(random, time)
    norm_level = random.uniform(0.2, 2.0) * (1.0 + 10.0 * np.exp(-time / 100.0))
    norm_level *= (1.0 + time / 1000.0) ** -0.2
    events: list[Event] = []
    for kind, least, most in (("lr drop", 0, 3), ("mixture", 1, 4), ("restart", 2, 6)):
        for _ in range(int(random.integers(least, most + 1))):
            at = int(random.integers(min(2000, horizon - 1), horizon))
            size, loss_factor, norm_factor = _EFFECTS[kind](random, time - at)
            if at < steps:
                level = level * loss_factor
                norm_level = norm_level * norm_factor
                events.append(Event(at, kind, size))
    amount = np.ones(steps)
    if seed % 2:
        for divisor in (8, 4):
            at = int(horizon / divisor * random.uniform(0.5, 1.0))
            amount[:at] *= np.sqrt(2.0)
            if at < steps:
                events.append(Event(at, "batch", 2.0))
    loss_noise = _noise(random, steps, scale=random.uniform(0.003, 0.012)) * amount
    norm_noise = _noise(random, steps, scale=random.uniform(0.05, 0.15)) * amount
    return Curve(
        loss=level * np.maximum(1.0 + loss_noise, 0.05),
        norm=norm_level * np.maximum(1.0 + norm_noise, 0.05),
        level=level,
        non_finite=np.zeros(steps, dtype=np.int64),
        events=tuple(sorted(events, key=lambda event: event.step)),
        onset=steps,
        evident=steps,
    )


def with_fault(curve: Curve, fault: Fault, onset: int, seed: int) -> Curve:
    """Return a healthy curve with a fault from step ``onset`` on.

    - NON_FINITE: NaN or infinity in loss or norm, or bad elements only, at one step.
    - SPIKE: the loss times 1.3 to 3 and at least 15 noise scales up, the norm times 4 to 50; for 1
      to 30 steps, falling off.
    - DIVERGENCE: three times out of four the level grows by 2% of itself times exp(t / τ) - 1, τ
      from 20 to 250 steps, up to 1 to 1.2 times the first loss; otherwise it is there within five
      steps. The norm grows alike.
    - STALL: the level stays what it is.

    Raises:
        GuardError: the curve has a fault already, or ``onset`` lies outside of it.
    """
    if curve.fault is not None:
        raise GuardError(f"the curve has the fault {curve.fault.value} already")
    if not 0 <= onset < len(curve):
        raise GuardError(f"onset must be a step of the curve's {len(curve)}, got {onset}")
    random = np.random.default_rng([0x6661756C74, seed])
    return attrs.evolve(_INJECTIONS[fault](random, curve, onset), fault=fault, onset=onset)


def _falling(random: np.random.Generator, time: Values) -> Values:
    first = np.log(random.integers(32_000, 128_000))
    last = random.uniform(1.6, 2.6)
    knee = random.uniform(20.0, 200.0)
    fallen: Values = last + (first - last) * (1.0 + time / knee) ** -random.uniform(0.35, 0.6)
    return fallen


def _lr_drop(random: np.random.Generator, since: Values) -> tuple[float, Values, Values]:
    size = float(random.uniform(0.01, 0.04))
    share = 1.0 - np.exp(-np.maximum(since, 0.0) / random.uniform(200.0, 1000.0))
    return -size, 1.0 - size * share, 1.0 + 0.2 * share


def _mixture(random: np.random.Generator, since: Values) -> tuple[float, Values, Values]:
    size = float(random.uniform(-0.1, 0.2))
    rest = 0.3 + 0.7 * np.exp(-np.maximum(since, 0.0) / random.uniform(500.0, 5000.0))
    loss = np.where(since >= 0, 1.0 + size * rest, 1.0)
    return size, loss, np.where(since >= 0, random.uniform(0.8, 1.4), 1.0)


def _restart(random: np.random.Generator, since: Values) -> tuple[float, Values, Values]:
    size = float(random.uniform(0.0, 0.08))
    rest = np.exp(-np.maximum(since, 0.0) / random.uniform(20.0, 150.0)) * (since >= 0)
    return size, 1.0 + size * rest, 1.0 + random.uniform(0.0, 0.6) * rest


_EFFECTS = {"lr drop": _lr_drop, "mixture": _mixture, "restart": _restart}


def _noise(random: np.random.Generator, steps: int, scale: float) -> Values:
    heavy = random.standard_t(3, steps)
    lag = random.uniform(0.0, 0.8)
    fast = _autocorrelated(heavy, lag)
    slow = _autocorrelated(random.standard_normal(steps), 0.995)
    total: Values = scale * (fast + 0.3 * slow)
    return total


def _autocorrelated(innovations: Values, lag: float) -> Values:
    share = float(np.sqrt(1.0 - lag**2))
    found = []
    value = float(innovations[0])
    for innovation in innovations.tolist():
        value = lag * value + share * innovation
        found.append(value)
    return np.array(found)


def _non_finite(random: np.random.Generator, curve: Curve, onset: int) -> Curve:
    loss, norm, bad = curve.loss.copy(), curve.norm.copy(), curve.non_finite.copy()
    value = [np.nan, np.inf][int(random.integers(2))]
    where = int(random.integers(3))
    if where == 0:
        loss[onset] = value
    elif where == 1:
        norm[onset] = value
    else:
        bad[onset] = 1 + int(random.integers(1000))
    return attrs.evolve(curve, loss=loss, norm=norm, non_finite=bad, evident=onset)


def _spike(random: np.random.Generator, curve: Curve, onset: int) -> Curve:
    since = np.arange(len(curve)) - onset
    length = int(np.exp(random.uniform(0.0, np.log(30.0))))
    shape = np.where(
        (since >= 0) & (since < length), np.exp(-2.0 * np.maximum(since, 0) / length), 0.0
    )
    before = slice(max(onset - 200, 0), onset + 1)
    noise = float(np.median(np.abs(curve.loss[before] / curve.level[before] - 1.0))) / 0.6745
    size = max(np.exp(random.uniform(np.log(1.3), np.log(3.0))) - 1.0, 15.0 * noise)
    norm = curve.norm * (1.0 + (np.exp(random.uniform(np.log(4.0), np.log(50.0))) - 1.0) * shape)
    loss = curve.loss + curve.level * size * shape
    return attrs.evolve(curve, loss=loss, norm=norm, evident=onset)


def _divergence(random: np.random.Generator, curve: Curve, onset: int) -> Curve:
    since = np.maximum(np.arange(len(curve)) - onset, 0).astype(np.float64)
    top = float(curve.level[0]) * random.uniform(1.0, 1.2) / curve.level
    if random.uniform() < 0.75:
        rate = np.exp(random.uniform(np.log(20.0), np.log(250.0)))
        factor = np.minimum(1.0 + 0.02 * np.expm1(np.minimum(since / rate, 50.0)), top)
    else:
        factor = 1.0 + (top - 1.0) * np.minimum(since / 5.0, 1.0)
    level = curve.level * factor
    risen = level[onset:] >= 1.05 * np.minimum.accumulate(level[onset:])
    evident = onset + int(np.argmax(risen)) if bool(risen.any()) else len(curve)
    return attrs.evolve(
        curve,
        loss=curve.loss * factor,
        norm=curve.norm * factor,
        level=level,
        evident=evident,
    )


def _stall(random: np.random.Generator, curve: Curve, onset: int) -> Curve:
    level = curve.level.copy()
    level[onset:] = level[onset]
    return attrs.evolve(curve, loss=curve.loss / curve.level * level, level=level, evident=onset)


_INJECTIONS = {
    Fault.NON_FINITE: _non_finite,
    Fault.SPIKE: _spike,
    Fault.DIVERGENCE: _divergence,
    Fault.STALL: _stall,
}
