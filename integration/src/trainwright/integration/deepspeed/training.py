"""The blocks ``optimizer`` and ``scheduler``, and clipping."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainwright.integration.deepspeed.draft import (
    AUTO,
    Draft,
    Word,
    number_of,
    only,
    refused,
    sets,
    shown,
    translate,
    truth,
    whole,
)
from trainwright.integration.errors import ConfigError
from trainwright.integration.foreign_rates import FOREIGN_RATES, foreign_rate, near
from trainwright.integration.settings import RateSettings

_LR = 1e-3
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "lion": {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0},
    "sgd": {"momentum": 0.0, "weight_decay": 0.0},
    "muon": {"momentum": 0.95, "weight_decay": 0.0},
}
"""What DeepSpeed's file means where it is silent."""


def clipping(draft: Draft, key: str, value: Any) -> None:
    """Read ``gradient_clipping``, which is off from 0 down."""
    if value != AUTO:
        draft.say("clip", max(0.0, number_of(key, value)), key)


def optimizer(draft: Draft, key: str, block: Any) -> None:
    """Read ``optimizer``; ``Adam`` is AdamW unless ``adam_w_mode`` is false."""
    translate(draft, {"type": _passed, "params": _passed}, block, key)
    params = {} if block.get("params") is None else block["params"]
    if not isinstance(params, Mapping):
        raise ConfigError(f"{key}.params must be a block, got {shown(params)}")
    kind = str(block.get("type"))
    name = kind.lower() if kind.lower() in _DEFAULTS else "none"
    if name == "none":
        raise ConfigError(
            f"{key}.type {kind!r} is not available{near(kind.lower(), dict(_DEFAULTS))}"
        )
    name = _adam(draft, f"{key}.params.adam_w_mode", name, params.get("adam_w_mode"))
    draft.say("optimizer", name, f"{key}.type {kind}")
    for leaf, value in {"lr": _LR, **_DEFAULTS[name]}.items():
        draft.imply(leaf, value)
    translate(draft, _PARAMS, params, f"{key}.params")


def _adam(draft: Draft, key: str, name: str, is_w_mode: Any) -> str:
    """Return the name of the optimizer; AdamW has no other mode, and others have none."""
    if is_w_mode is not None:
        truth(key, is_w_mode)
        if name not in ("adam", "adamw"):
            raise ConfigError(f"{key} is for Adam and AdamW, not for {name}; leave it out")
        if name == "adamw" and not is_w_mode:
            draft.notes.append(f"{key} has no effect: only Adam has another mode than AdamW's")
    return "adamw" if name == "adam" and is_w_mode in (None, True) else name


def scheduler(draft: Draft, key: str, block: Any) -> None:
    """Read ``scheduler``; "auto" takes the rate, the steps and the warm-up of other settings."""
    translate(draft, {"type": _passed, "params": _passed}, block, key)
    kind, params = block.get("type"), block.get("params")
    if not isinstance(kind, str) or kind not in FOREIGN_RATES:
        raise ConfigError(f"{key}.type {kind!r} is not available{near(str(kind), FOREIGN_RATES)}")
    if not isinstance(params, Mapping):
        raise ConfigError(f"{key}.params must be a block, got {shown(params)}")
    path = f"{key}.params"
    total = params.get("total_num_steps")
    if total not in (None, AUTO):  # which a rise that is left to options may be a part of
        params = {**params, "total_num_steps": whole(1)(f"{path}.total_num_steps", total)}
        draft.say("steps", params["total_num_steps"], f"{path}.total_num_steps")
    values = {n: _filled(draft, path, n, v) for n, v in params.items() if v is not None}
    _peak(draft, path, kind, values)
    if values.get("warmup_max_lr") is not None:
        draft.agrees("lr", values["warmup_max_lr"], f"{path}.warmup_max_lr")
    if "warmup_num_steps" in values:
        draft.agrees("warmup", values["warmup_num_steps"], f"{path}.warmup_num_steps")
        draft.take("warmup")
    text = json.dumps({"type": kind, "params": values})
    foreign_rate(text)
    draft.say("scheduler", text, f"{key}.type")


def _peak(draft: Draft, path: str, kind: str, values: dict[str, Any]) -> None:
    """Let an option say what the file leaves out; tell where another rate has no effect."""
    if kind == "WarmupDecayLR" and "warmup_max_lr" not in values:
        if draft.flags.get("lr") is not None:
            values["warmup_max_lr"] = None
        else:
            draft.notes.append(
                f"{path}.warmup_max_lr is left out: rates rise to 0.001, whatever lr the optimizer "
                'has; say "auto" for that'
            )
    elif kind in ("OneCycle", "LRRangeTest") and draft.flags.get("lr") is not None:
        draft.notes.append(f"--lr has no effect with {kind}, which has rates of its own")


def _filled(draft: Draft, path: str, name: str, value: Any) -> Any:
    if value != AUTO:
        return value
    if name == "warmup_num_steps":
        rise = RateSettings(
            warmup=draft.take("warmup"), warmup_fraction=draft.take("warmup_fraction")
        )
        steps = draft.said["steps"][0] if "steps" in draft.said else draft.flags.get("steps")
        if steps is None and rise.warmup is None:
            raise ConfigError(f'{path}.{name}="auto" needs --warmup, or --steps')
        return max(1, rise.warmup_steps(steps or 0))
    if name not in _AUTO:
        raise ConfigError(f'{path}.{name}="auto" has no meaning here; write a number')
    return _AUTO[name]


_AUTO: Mapping[str, Any] = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "total_num_steps": None}
"""None stands for the rate and the steps of the run."""


def _passed(draft: Draft, key: str, value: Any) -> None:
    """Read later."""


def _decay(draft: Draft, key: str, value: Any) -> None:
    sets("weight_decay", number_of)(draft, key, value)
    if value not in (AUTO, 0):
        draft.notes.append(f"{key} is that of matrices alone: norms and biases do not decay")


def _betas(draft: Draft, key: str, value: Any) -> None:
    if value == AUTO:
        return
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError(f"{key} must be two numbers, got {shown(value)}")
    for leaf, beta in zip(("beta1", "beta2"), value, strict=True):
        draft.say(leaf, number_of(key, beta), key)


_PARAMS: Mapping[str, Word] = {
    "lr": sets("lr", number_of),
    "betas": _betas,
    "eps": sets("eps", number_of),
    "weight_decay": _decay,
    "momentum": sets("momentum", number_of),
    "nesterov": sets("nesterov", truth),
    "adam_w_mode": _passed,
    "bias_correction": only(True, "moments are always corrected for their beginning"),
    "amsgrad": only(False, "the greatest second moments are not kept"),
    "maximize": only(False, "losses are made smaller"),
    "max_grad_norm": refused("say gradient_clipping"),
}
