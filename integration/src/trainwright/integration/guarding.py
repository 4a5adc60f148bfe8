"""What watches a run and what happens then, as a value that is read from a name or a file."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.integration.outside_files import parse_json, read_text
from trainwright.integration.settings.files import without_repeats
from trainwright.integration.signals import ATTENTION, LOGIT, UPDATE
from trainwright.stability_guards import (
    BoundGuard,
    DivergenceGuard,
    EmptyStepGuard,
    GrowthGuard,
    Guard,
    GuardError,
    JointSpikeGuard,
    LocalVerdictGuard,
    NonFiniteGuard,
    Positions,
    RecoveryPlan,
    SpikeGuard,
    StallGuard,
    Verdict,
    all_guards,
    any_of,
    default_guards,
    escalate,
)

GUARDS: dict[str, Callable[..., Guard]] = {
    "non-finite": NonFiniteGuard,
    "local": LocalVerdictGuard,
    "spike": functools.partial(SpikeGuard, signal="loss"),
    "joint-spike": JointSpikeGuard,
    "divergence": DivergenceGuard,
    "stall": StallGuard,
    "update-ratio": functools.partial(BoundGuard, UPDATE, most=0.1, in_a_row=3),
    "logit-growth": functools.partial(GrowthGuard, LOGIT, floor=50.0),
    "attention-growth": functools.partial(GrowthGuard, ATTENTION, floor=50.0),
}
"""Guards that a file can name; "escalate" beside a guard's arguments makes it sterner each time."""

ESCALATION = ("skips", "rollbacks", "within_steps")
SIGNALS = ("loss", "norm")
"""What the recipe tells guards of a step."""
OF_MODELS = {"update-ratio": UPDATE, "logit-growth": LOGIT, "attention-growth": ATTENTION}
"""Guards of what is measured of the model, every so many steps, and the signal of each."""
SIGNALS_EVERY = 20
VERDICTS = tuple(verdict.name for verdict in Verdict)
END_OF_DATA = 2**48
"""No run reads so far; positions are counted in whole numbers of the machine."""


@attrs.frozen
class GuardPlan:
    """What watches a run.

    Args:
        guard: what judges each step.
        recovery: how a run goes back, and how often.
        snapshots: how many states are kept in host memory to go back to; 0 for none.
        asks_snapshots: whether somebody has said how many.
        snapshot_bytes: what they may take together on a rank; None for no bound.
        signals: of the model, which the guard watches.
        signals_every: steps between measurements of the model, for guards of it; 0 for none.
        replicas_every: steps between comparisons of weights that data ranks have alike; 0 for none.
        exclude: positions of the run's sample order that are never read.
    """

    guard: Guard
    recovery: RecoveryPlan = attrs.field(factory=RecoveryPlan)
    snapshots: int = 2
    asks_snapshots: bool = False
    snapshot_bytes: int | None = None
    signals: tuple[str, ...] = ()
    signals_every: int = 0
    replicas_every: int = 100
    exclude: Positions = attrs.field(factory=Positions)

    @functools.cached_property
    def guard_name(self) -> str:
        """What tells the guard from others, whose memory it could not go on with."""
        return repr(self.guard)


def read_guards(text: str, exclude: str | None = None, *, scales_losses: bool = False) -> GuardPlan:
    """Return the plan that ``--guards`` and ``--exclude`` name.

    Args:
        text: ``default``, ``all``, ``none``, or a JSON file such as ``{"guards": {"non-finite": {},
            "joint-spike": {"escalate": {"skips": 2}}}, "recovery": {"snapshot_every": 50},
            "snapshots": 2, "snapshot_bytes": 1000000000, "replicas_every": 100}``, in
            which all but the guards may be left out.
            A guard's ``signal`` is "loss" or "norm", its ``verdict`` "SKIP", "ROLLBACK" or "HALT".
        exclude: a JSON file with a list of positions and of spans [start, stop].
        scales_losses: whether a loss scale has to find its place: then a batch that was skipped is
            read again after the run has gone back, for its data may be good.

    Raises:
        ConfigError: a file cannot be read, or has something that is not known.
    """
    plan = GuardPlan(default_guards())
    if text == "none":
        plan = GuardPlan(EmptyStepGuard(), snapshots=0, replicas_every=0)
    elif text == "all":
        plan = GuardPlan(
            all_guards(), signals=tuple(OF_MODELS.values()), signals_every=SIGNALS_EVERY
        )
    elif text != "default":
        plan = _plan_of(_read_json(text, "--guards"), text)
    if exclude is not None:
        try:
            positions = Positions.from_json(_read_json(exclude, "--exclude"))
        except GuardError as error:
            raise ConfigError(f"--exclude {exclude}: {error}") from error
        if positions and positions.spans[-1][1] > END_OF_DATA:
            raise ConfigError(
                f"--exclude {exclude} leaves out positions up to {positions.spans[-1][1] - 1}, and "
                f"nothing to read behind them; give positions below {END_OF_DATA}"
            )
        plan = attrs.evolve(plan, exclude=positions)
    if scales_losses:
        plan = attrs.evolve(plan, recovery=attrs.evolve(plan.recovery, replay_skipped=True))
    return plan


def _plan_of(values: Any, file: str) -> GuardPlan:
    what = f"--guards {file}"
    counts = ("snapshots", "snapshot_bytes", "signals_every", "replicas_every")
    _check_keys(what, values, ("guards", "recovery", *counts))
    if "guards" not in values:
        raise ConfigError(
            f'{what} must name "guards"; {{"guards": {{}}}} lets steps with tokens be'
        )
    named = values["guards"]
    _check_keys(f"{what}: guards", named, GUARDS)
    chosen = (_guard(f"{what}: {name}", name, own) for name, own in named.items())
    # Whatever is chosen: an update for no token would be decay and old moments alone.
    guard = any_of(EmptyStepGuard(), *chosen)
    recovery = _make(f"{what}: recovery", RecoveryPlan, values.get("recovery", {}))
    counted = {name: values[name] for name in counts if name in values}
    for name, value in counted.items():
        if type(value) is not int or value < 0:
            raise ConfigError(f"{what}: {name} must be a whole number from 0, got {value!r}")
    asks = [name for name in named if name in OF_MODELS]
    if not asks and counted.get("signals_every"):
        raise ConfigError(f"{what}: signals_every has no effect; {', '.join(OF_MODELS)} use it")
    if asks and not counted.setdefault("signals_every", SIGNALS_EVERY):
        raise ConfigError(f"{what}: {', '.join(asks)} need signals_every from 1, got 0")
    signals = tuple(OF_MODELS[name] for name in asks)
    plan = GuardPlan(guard, recovery, signals=signals, asks_snapshots="snapshots" in counted)
    return attrs.evolve(plan, **counted)


def _guard(what: str, name: str, values: Any) -> Guard:
    if not isinstance(values, dict):
        raise ConfigError(f"{what} must be an object of its arguments, got {values!r}")
    own = {key: value for key, value in values.items() if key != "escalate"}
    if own.get("signal", "loss") not in SIGNALS:
        raise ConfigError(f"{what}: signal must be one of {SIGNALS}, got {own['signal']!r}")
    if "verdict" in own:
        if own["verdict"] not in VERDICTS:
            raise ConfigError(f"{what}: verdict must be one of {VERDICTS}, got {own['verdict']!r}")
        own["verdict"] = Verdict[own["verdict"]]
    guard: Guard = _make(what, GUARDS[name], own)
    if "escalate" not in values:
        return guard
    made: Guard = _make(
        f"{what}: escalate", functools.partial(escalate, guard), values["escalate"], ESCALATION
    )
    return made


def _make(
    what: str, make: Callable[..., Any], values: Any, allowed: Iterable[str] | None = None
) -> Any:
    known = list(inspect.signature(make).parameters) if allowed is None else allowed
    _check_keys(what, values, known)
    try:
        return make(**values)
    except (GuardError, TypeError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from error


def _check_keys(what: str, values: Any, allowed: Iterable[str]) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{what} must be a JSON object, got {values!r}")
    known = list(allowed)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{what} knows {', '.join(known)}, got {key!r}{hint}")


def _read_json(path: str, option: str) -> Any:
    try:
        return parse_json(read_text(Path(path)), without_repeats)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: cannot be read as JSON: {error}") from error
