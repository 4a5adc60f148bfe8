"""Rotary positions as config.json says them, in its old and its new form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from trainwright.integration.hugging_face.keys import Keys
from trainwright.integration.model.rotary import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    yarn_magnitude,
)


def read_rope(keys: Keys, default_base: float) -> tuple[float, RopeScaling | None]:
    """Return the base of the frequencies and what stretches them.

    Raises:
        ConfigError: They are stretched in a way that is not implemented, or only in part.
    """
    new, old = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    base = keys.real("rope_theta", new.pop("rope_theta", default_base))
    keys.only("partial_rotary_factor", 1.0)
    rule = Keys({**old, **new}, f"{keys.source}: rope")
    kind = rule.optional("rope_type")
    older = rule.optional("type")
    kind = kind or older or "default"
    rule.only("partial_rotary_factor", 1.0)
    if kind not in _READERS:
        known = ", ".join(sorted(_READERS))
        rule.refuse(f"rope_type={kind!r} is not implemented; {known} are")
    longest = keys.number("max_position_embeddings")
    scaling = _READERS[kind](rule, longest)
    rule.finish()
    return base, scaling


def write_rope(base: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return ``rope_parameters``, and beside it what older readers look for."""
    told: dict[str, Any] = {"rope_type": "default"}
    if isinstance(scaling, LinearScaling):
        told = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        told = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": int(scaling.original),
        }
    elif isinstance(scaling, YarnScaling):
        told = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": int(scaling.original),
            "attention_factor": scaling.magnitude,
            "beta_fast": scaling.fast,
            "beta_slow": scaling.slow,
            "truncate": scaling.truncate,
        }
    return {"rope_theta": base, **told}


def _read_none(rule: Keys, longest: int) -> None:
    """Plain frequencies: what else is there is refused as unknown."""


def _read_linear(rule: Keys, longest: int) -> RopeScaling:
    return LinearScaling(rule.real("factor"))


def _read_llama3(rule: Keys, longest: int) -> RopeScaling:
    return Llama3Scaling(
        rule.real("factor"),
        rule.real("low_freq_factor"),
        rule.real("high_freq_factor"),
        rule.number("original_max_position_embeddings", longest),
    )


def _read_yarn(rule: Keys, longest: int) -> RopeScaling:
    original = rule.number("original_max_position_embeddings", longest)
    factor = rule.real("factor", longest / original)
    above, below = rule.optional("mscale"), rule.optional("mscale_all_dim")
    magnitude = yarn_magnitude(factor)
    if above and below:
        magnitude = yarn_magnitude(factor, above) / yarn_magnitude(factor, below)
    scaling = YarnScaling(
        factor,
        original,
        rule.real("beta_fast", 32.0),
        rule.real("beta_slow", 1.0),
        rule.real("attention_factor", magnitude),
    )
    return attrs.evolve(scaling, truncate=rule.flag("truncate", True))


_READERS: dict[str, Callable[[Keys, int], RopeScaling | None]] = {
    "default": _read_none,
    "linear": _read_linear,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}
