"""The blocks ``fp16`` and ``bf16``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.integration.deepspeed.draft import (
    AUTO,
    Draft,
    Word,
    number_of,
    only,
    sets,
    shown,
    translate,
    truth,
    whole,
)
from trainwright.integration.errors import ConfigError

_GREATEST_POWER = 127
"""The loss is scaled in float32, whose greatest number is below 2**128."""
_MASTERS = "weights are updated in at least float32"


def fp16(draft: Draft, key: str, block: Any) -> None:
    """Read ``fp16``: the dtype, and what scales the losses."""
    if not _is_enabled(draft, key, block, "float16"):
        return
    # Where DeepSpeed's defaults are others than ours, its file means its own.
    for leaf, value in (("initial_scale", 2.0**16), ("scale_window", 1000), ("hysteresis", 2)):
        draft.imply(leaf, value)
    translate(draft, _FP16, block, key)


def bf16(draft: Draft, key: str, block: Any) -> None:
    """Read ``bf16``: the dtype. ``bfloat16`` is another name of it."""
    if _is_enabled(draft, key, block, "bfloat16"):
        translate(draft, _BF16, block, key)


def _is_enabled(draft: Draft, key: str, block: Any, dtype: str) -> bool:
    if not isinstance(block, Mapping):
        raise ConfigError(f'{key} must be a block such as {{"enabled": true}}, got {shown(block)}')
    enabled, given = block.get("enabled", False), draft.flags.get("dtype")
    if enabled == AUTO:
        enabled = given == dtype
    if truth(f"{key}.enabled", enabled):
        draft.say("dtype", dtype, f"{key}.enabled")
        return True
    if given == dtype:
        raise ConfigError(f"{key}.enabled says false and --dtype says {given}; say one of them")
    words = _FP16 if key == "fp16" else _BF16
    translate(Draft({}), dict.fromkeys(words, _passed), block, key)  # names must be right
    if len(block) > 1:
        draft.notes.append(f"{key} is not enabled: its other keys have no effect")
    return False


def _passed(draft: Draft, key: str, value: Any) -> None:
    """Accept any value."""


def _loss_scale(draft: Draft, key: str, value: Any) -> None:
    scale = number_of(key, value)
    if scale < 0:
        raise ConfigError(f"{key} must be from 0, which lets it follow the gradients, got {value}")
    if scale:
        draft.say("loss_scale", scale, key)
    else:
        draft.agrees("loss_scale", scale, key)


def _scale_power(key: str, value: Any) -> float:
    power = whole(0)(key, value)
    if power > _GREATEST_POWER:
        raise ConfigError(f"{key} must be at most {_GREATEST_POWER}, got {value}")
    return 2.0**power


def _min_scale(key: str, value: Any) -> float:
    return float(whole(1)(key, value))


_FP16: Mapping[str, Word] = {
    "enabled": _passed,
    "loss_scale": _loss_scale,
    "initial_scale_power": sets("initial_scale", _scale_power),
    "loss_scale_window": sets("scale_window", whole(1)),
    "hysteresis": sets("hysteresis", whole(1)),
    "consecutive_hysteresis": sets("hysteresis_refills", truth),
    "min_loss_scale": sets("min_scale", _min_scale),
    "fp16_master_weights_and_grads": only(False, _MASTERS),
}
_BF16: Mapping[str, Word] = {
    "enabled": _passed,
    "check_grad_overflow": only(True, "every step's gradients are checked"),
    "bf16_master_weights_and_grads": only(False, _MASTERS),
    "bf16_optimizer_states": only(False, _MASTERS),
}
