"""The block ``zero_optimization``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.integration.config import RunConfig
from trainwright.integration.deepspeed.draft import (
    AUTO,
    Draft,
    Word,
    number_of,
    only,
    refused,
    shown,
    translate,
    truth,
    whole,
)
from trainwright.integration.errors import ConfigError
from trainwright.integration.settings.parallel import NVME
from trainwright.sharding import ShardingError
from trainwright.sharding.data import (
    DEEPSPEED_REASONS,
    OFFLOAD_BLOCKS,
    AskedOffload,
    offload_from_deepspeed,
)

_GRADIENT_BYTES = 4  # gradients are float32, whatever the weights are


def zero_optimization(draft: Draft, key: str, block: Any) -> None:
    """Read ``zero_optimization``."""
    if not isinstance(block, Mapping):
        raise ConfigError(f'{key} must be a block such as {{"stage": 2}}, got {shown(block)}')
    given = _with_full_names(key, block)
    stage = _stage(draft, f"{key}.stage", given.get("stage"))
    if stage >= 2:
        draft.imply("reduce", "microbatch")
    translate(draft, _WORDS, given, key)
    _offload(draft, key, given, stage)
    if stage < 3:
        _buckets(draft, key, given)
    else:
        _live_units(draft, key, given)


def _with_full_names(key: str, block: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in block.items():
        full = f"stage3_{name}" if f"stage3_{name}" in _STAGE_3 else name
        if full in given:
            raise ConfigError(f"{key} has {full} twice, under two names; keep one")
        given[full] = value
    return given


def _stage(draft: Draft, key: str, value: Any) -> int:
    if value == AUTO:
        value = draft.flags.get("zero")
        if value is None:
            raise ConfigError(f'{key}="auto" needs --zero')
    if value is None:
        # Who says nothing does not contradict an option.
        draft.imply("zero", 0)
        return int(draft.flags.get("zero") or 0)
    stage = whole(0)(key, value)
    if stage > 3:
        raise ConfigError(f"{key} must be 0, 1, 2 or 3, got {stage}")
    draft.say("zero", stage, key)
    return stage


def _buckets(draft: Draft, key: str, given: Mapping[str, Any]) -> None:
    """Set the bound of buckets, in which gradients are reduced and weights collected alike."""
    sizes = {
        name: whole(1)(f"{key}.{name}", given[name])
        for name in ("reduce_bucket_size", "allgather_bucket_size")
        if given.get(name) not in (None, AUTO)
    }
    for name in ("stage3_prefetch_bucket_size", "stage3_max_live_parameters"):
        if given.get(name) is not None:
            draft.notes.append(f"{key}.{name} has no effect below stage 3")
    if sizes:
        least = min(sizes, key=lambda name: sizes[name])
        draft.say("bucket_bytes", _GRADIENT_BYTES * sizes[least], f"{key}.{least}")


def _live_units(draft: Draft, key: str, given: Mapping[str, Any]) -> None:
    """Set how many layers are whole at once: the one computed, and those fetched ahead."""
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        if given.get(name) is not None:
            draft.notes.append(f"{key}.{name} has no effect at stage 3: a layer travels at once")
    said = {
        name: number_of(f"{key}.{name}", given[name])
        for name in ("stage3_prefetch_bucket_size", "stage3_max_live_parameters")
        if given.get(name) not in (None, AUTO)
    }
    if not said:
        return
    config = RunConfig.of(**draft.flags)
    parallel, shape = config.parallel, config.model.shape
    if parallel.gather in ("step", "action") or (
        parallel.gather == "auto" and parallel.mesh.pp > 1
    ):
        names = " and ".join(f"{key}.{name}" for name in said)
        draft.notes.append(f"{names} have no effect where whole pipeline stages are gathered")
        return
    layer = shape.num_parameters / shape.layers / parallel.mesh.tp
    prefetched = said.get("stage3_prefetch_bucket_size", layer)
    live = min(1 + -(-prefetched // layer), said.get("stage3_max_live_parameters", 1e18) // layer)
    draft.say("live_units", int(max(1, min(live, shape.layers))), " and ".join(said))


def _overlap(draft: Draft, key: str, value: Any) -> None:
    if value != AUTO:
        draft.say("overlap", truth(key, value), key)


def _offload(draft: Draft, key: str, block: Mapping[str, Any], stage: int) -> None:
    """Set what does not stay on the device; a configuration may leave that to an option."""
    blocks = {n: block[n] for n in OFFLOAD_BLOCKS if block.get(n) not in (None, AUTO)}
    for name, asks in list(blocks.items()):
        if isinstance(asks, Mapping) and asks.get("device") == AUTO:
            _asked(key, {name: {**asks, "device": "none"}}, stage)  # names must be right
            draft.notes.append(f"{key}.{name} has no effect: --offload says the device")
            del blocks[name]
    if not blocks:
        return
    named = " and ".join(f"{key}.{name}" for name in blocks)
    asked = _asked(key, blocks, stage)
    where = {
        "device": "none",
        "host": "parameters" if asked.weights else "optimizer",
        "file": f"{NVME}{asked.folder}",
    }[asked.states]
    if draft.drop_offload:
        if (given := draft.flags.get("offload")) not in (None, "none"):
            raise ConfigError(
                f"--drop-offload leaves all on the device and --offload says {given}; say one of "
                "them"
            )
        if where != "none":
            draft.notes.append(f"{named} to {where} is dropped: all stays on the device")
        return
    draft.notes.extend(f"{key}.{note}" for note in asked.notes)
    draft.say("offload", where, named)


def _asked(key: str, blocks: Mapping[str, Any], stage: int) -> AskedOffload:
    try:
        return offload_from_deepspeed(blocks, stage)
    except ShardingError as error:
        raise ConfigError(f"{key}: {error}") from error


def _read_together(draft: Draft, key: str, value: Any) -> None:
    """Nothing: `_offload` reads these keys together."""


def _read_elsewhere(draft: Draft, key: str, value: Any) -> None:
    if value != AUTO:
        whole(0)(key, value)


_STAGE_3 = (
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_module_granularity_threshold",
)
_ALWAYS = ("contiguous_gradients", "reduce_scatter", "allgather_partitions")
_NEVER = (
    "legacy_stage1",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)
_WORDS: Mapping[str, Word] = {
    "stage": _read_elsewhere,
    "reduce_bucket_size": _read_elsewhere,
    "allgather_bucket_size": _read_elsewhere,
    "stage3_prefetch_bucket_size": _read_elsewhere,
    "stage3_max_live_parameters": _read_elsewhere,
    "overlap_comm": _overlap,
    **{key: only(True, DEEPSPEED_REASONS[key]) for key in _ALWAYS},
    **{key: only(False, DEEPSPEED_REASONS[key]) for key in _NEVER},
    **{key: refused(DEEPSPEED_REASONS[key]) for key in ("zeropp_loco_param", "zenflow")},
    "ignore_unused_parameters": only(True, "a weight without a gradient has one of zeros"),
    "compute_grad_norm": only(True, "every step has a norm"),
    **dict.fromkeys(OFFLOAD_BLOCKS, _read_together),
    "zero_hpz_partition_size": only(1, "there is no second cut of weights inside nodes"),
    "mics_shard_size": refused("say --layout dp=N,dp_shard=M"),
    "mics_hierarchical_params_gather": refused("say --layout dp=N,dp_shard=M"),
}
