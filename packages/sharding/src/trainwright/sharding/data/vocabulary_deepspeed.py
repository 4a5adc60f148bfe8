"""DeepSpeed's ``zero_optimization`` block, as a `ShardPolicy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainwright.sharding.data.deepspeed_reasons import DEEPSPEED_REASONS
from trainwright.sharding.data.units import UnitRule
from trainwright.sharding.data.vocabularies import (
    Draft,
    Translation,
    Word,
    notes,
    refuses,
    shown,
    to_bool,
    translate,
)
from trainwright.sharding.data.vocabulary_offload import OFFLOAD_BLOCKS, offload_from_deepspeed
from trainwright.sharding.errors import ShardingError

_GRADIENT_BYTES = 4  # gradients are float32, whatever the weights are


def policy_from_deepspeed(
    zero_optimization: Mapping[str, Any], units: UnitRule | None = None
) -> Translation:
    """Translate the ``zero_optimization`` block of a DeepSpeed configuration (0.19).

    Numbers may be written ``5e8`` or ``"5e8"``; null means absent; ``"auto"`` is refused, for
    there is nobody left to fill it in.

    Args:
        zero_optimization: The block, as read from JSON.
        units: What is gathered together at stage 3, where DeepSpeed goes by the innermost module.

    Raises:
        ShardingError: A key is unknown, a value is no value of its key, or two contradict.
        NotAvailableError: A key asks for what this package does not have.
    """
    if not isinstance(zero_optimization, Mapping):
        raise ShardingError(
            "zero_optimization must be a block such as {'stage': 2}, got "
            f"{shown(zero_optimization)}"
        )
    given: dict[str, Any] = {}
    for key, value in zero_optimization.items():
        name = _ALIASES.get(key, key)
        if name in given:
            raise ShardingError(f"zero_optimization has {name} twice, under two names; keep one")
        if value == "auto":
            raise ShardingError(f"{key}='auto' must be filled in by whoever understands it")
        if value is not None:
            given[name] = value
    draft = Draft({} if units is None else {"units": units})
    translate(draft, _WORDS, given, "zero_optimization")
    stage = draft.fields.get("stage", 0)
    draft.offload = offload_from_deepspeed(given, stage)
    draft.notes += draft.offload.notes
    if stage >= 2:
        draft.fields.setdefault("reduce_each_backward", True)
        draft.notes.append(
            "reduce_each_backward=True: as DeepSpeed's stages 2 and 3; False reduces once a step"
        )
    if stage == 3 and draft.fields.get("units") is None:
        draft.notes.append(
            "units=None: the whole model is gathered at once, where DeepSpeed fetches module by "
            "module; give units=by_class(...) to need only a few at a time"
        )
    return draft.finish()


def _stage(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, bool):
        raise ShardingError(f"{key}={value}: write the stage as a number, 0 to 3")
    draft.fields["stage"] = _to_int(key, value)


def _bucket_size(draft: Draft, key: str, value: Any) -> None:
    draft.fields["bucket_bytes"] = _GRADIENT_BYTES * _to_int(key, value)
    if draft.fields.get("stage") == 3:
        draft.notes.append(f"{key}={value}: at stage 3 a unit's group is one bucket of any size")


def _unused_parameters(draft: Draft, key: str, value: Any) -> None:
    if to_bool(key, value):
        return
    draft.fields["missing_gradients"] = "error"
    if draft.fields.get("stage", 0) >= 2:
        draft.fields["reduce_each_backward"] = False


def _prefetch(draft: Draft, key: str, value: Any) -> None:
    draft.fields["live_units"] = 2 if _to_int(key, value) else 1
    draft.notes.append(f"{key}={value}: live_units counts units, not elements")


def _leaf_modules(draft: Draft, key: str, value: Any) -> None:
    known = ("classes", "names", "name_suffixes")
    if not isinstance(value, Mapping) or not set(value) <= set(known):
        raise ShardingError(f"{key} is a block of {', '.join(known)}, got {shown(value)}")
    if not any(value.values()):
        return
    if draft.fields.get("units") is not None:
        raise ShardingError(
            f"{key} and units both choose what is gathered together; let units choose these too"
        )
    draft.fields["units"] = _leaf_rule(
        *(tuple(value.get(part) or ()) for part in ("classes", "names", "name_suffixes"))
    )


def _leaf_rule(
    classes: tuple[str, ...], names: tuple[str, ...], suffixes: tuple[str, ...]
) -> UnitRule:
    def rule(name: str, module: nn.Module) -> bool:
        kind = type(module)
        spoken = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        return (
            any(one in classes for one in spoken)
            or name in names
            or any(name.endswith(suffix) for suffix in suffixes)
        )

    return rule


def _read_elsewhere(draft: Draft, key: str, value: Any) -> None:
    """Nothing: `offload_from_deepspeed` reads it together with others."""


def _mics(draft: Draft, key: str, value: Any) -> None:
    ranks = _to_int(key, value)
    if ranks > 0:
        draft.mesh_changes["dp_shard"] = ranks


def _to_int(key: str, value: Any) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ShardingError(f"{key} must be a number, got {value!r}") from None
    if isinstance(value, bool) or not number.is_integer():
        raise ShardingError(f"{key} must be a whole number, got {value!r}")
    return int(value) if isinstance(value, int) else int(number)


_REFUSED = (
    "legacy_stage1",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zeropp_loco_param",
    "zenflow",
)
_NOTED = tuple(key for key in DEEPSPEED_REASONS if key not in _REFUSED)

_WORDS: dict[str, Word] = {
    "stage": _stage,
    "reduce_bucket_size": _bucket_size,
    "ignore_unused_parameters": _unused_parameters,
    "stage3_prefetch_bucket_size": _prefetch,
    "leaf_module": _leaf_modules,
    "mics_shard_size": _mics,
    **{key: notes(DEEPSPEED_REASONS[key]) for key in _NOTED},
    **{key: refuses(DEEPSPEED_REASONS[key]) for key in _REFUSED},
    "allgather_bucket_size": notes("weights are collected in the buckets of the gradients"),
    "overlap_comm": notes("reductions overlap with the backward that last_backward() announces"),
    "compute_grad_norm": notes("one_norm computes it where it is called"),
    "parameter_alignment": notes("ShardPolicy.alignment says it in elements"),
    "stage3_max_live_parameters": notes("live_units bounds what is live, in units"),
    "stage3_max_reuse_distance": notes("release_after_forward says whether a unit is kept"),
    "stage3_module_granularity_threshold": notes("units=by_size(...) says it"),
    "override_module_apply": notes("data_parallel(initialize=...) initialises unit by unit"),
    "save_muon_momentum_buffer_in_memory": notes("WholeMatrices keeps states where it updates"),
    **dict.fromkeys(OFFLOAD_BLOCKS, _read_elsewhere),
    "mics_hierarchical_params_gather": refuses("a unit is gathered by one all-gather"),
    "zero_hpz_partition_size": refuses(
        "a second cut of weights inside nodes; a hybrid mesh (MeshShape(dp_shard=...)) gathers "
        "inside nodes too",
        unless=(1,),
    ),
}

_ALIASES = {name.removeprefix("stage3_"): name for name in _WORDS if name.startswith("stage3_")}
