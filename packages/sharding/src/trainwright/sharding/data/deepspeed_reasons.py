"""Why keys of DeepSpeed's ``zero_optimization`` have no counterpart here."""

from __future__ import annotations

from collections.abc import Mapping

_CHECKPOINT = "a matter of the checkpoint, which holds pieces and loads in any layout"
_EVEN = "every rank keeps an equal range of each bucket"
_OWN_WAY = "a detail of DeepSpeed's implementation"
_PERSISTENT = "small parameters travel with their unit, so that keeping them whole saves nothing"
_QUANTISED = "weights and gradients travel in the weight and reduce dtypes"

DEEPSPEED_REASONS: Mapping[str, str] = {
    "allgather_partitions": "weights are collected by all-gather",
    "contiguous_gradients": "gradients always lie in flat buffers",
    "reduce_scatter": "gradients are reduce-scattered from stage 1 on",
    "use_multi_rank_bucket_allreduce": _EVEN,
    "round_robin_gradients": _EVEN,
    "load_from_fp32_weights": _CHECKPOINT,
    "elastic_checkpoint": _CHECKPOINT,
    "pipeline_loading_checkpoint": _CHECKPOINT,
    "stage3_gather_16bit_weights_on_model_save": _CHECKPOINT,
    "stage3_gather_fp16_weights_on_model_save": _CHECKPOINT,
    "sub_group_size": "all pieces are updated in one call, or unit by unit where offloaded",
    "stage3_param_persistence_threshold": _PERSISTENT,
    "stage3_model_persistence_threshold": _PERSISTENT,
    "stage3_use_all_reduce_for_fetch_params": "weights are collected by all-gather",
    "stage3_allgather_sequential": "a unit's buckets are gathered together",
    "memory_efficient_linear": _OWN_WAY,
    "log_trace_cache_warnings": _OWN_WAY,
    "enable_sanity_checks": "ranks always agree on what they gather next, or are told",
    "cpu_offload_use_pin_memory": _OWN_WAY,
    "legacy_stage1": "removed from DeepSpeed too",
    "zero_quantized_weights": _QUANTISED,
    "zero_quantized_nontrainable_weights": _QUANTISED,
    "zero_quantized_gradients": _QUANTISED,
    "zeropp_loco_param": _QUANTISED,
    "zenflow": "every update uses every gradient",
}
"""By key, what is done here instead; the same whatever calls this package."""
