"""The keys of DeepSpeed that are read and have nothing to change here, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.sharding.data import DEEPSPEED_REASONS

_LOG = "metrics.jsonl and the report hold every step"
_OWN = "a detail of DeepSpeed's implementation"
_CHECKPOINT = "checkpoints are committed whole and load in any layout"
_UNITS = "layers are gathered and given back one by one"

_SHARED = (
    "use_multi_rank_bucket_allreduce",
    "round_robin_gradients",
    "load_from_fp32_weights",
    "elastic_checkpoint",
    "pipeline_loading_checkpoint",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "sub_group_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "memory_efficient_linear",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "cpu_offload_use_pin_memory",
)
"""Keys of ``zero_optimization`` that the sharding package gives the reasons for."""

IGNORED: Mapping[str, str] = {
    **{f"zero_optimization.{key}": DEEPSPEED_REASONS[key] for key in _SHARED},
    "steps_per_print": _LOG,
    "wall_clock_breakdown": _LOG,
    "memory_breakdown": _LOG,
    "dump_state": _LOG,
    "log_level": _LOG,
    "timers": _LOG,
    "prescale_gradients": "losses are divided by all tokens of the batch before backward",
    "gradient_predivide_factor": "losses are divided by all tokens of the batch before backward",
    "disable_python_gc": _OWN,
    "disable_allgather": _OWN,
    "zero_allow_untested_optimizer": "optimizers that need whole matrices are given them",
    "zero_force_ds_cpu_optimizer": _OWN,
    "dataloader_drop_last": "every batch is full",
    "use_data_before_expert_parallelism": "--layout says the order of ranks",
    "vocabulary_size": "the tokenizer says it",
    "seq_parallel_communication_data_type": "gradients travel in one dtype over all ranks",
    "aio": "one thread reads the file of offloaded states and one writes it",
    "checkpoint.tag_validation": _CHECKPOINT,
    "checkpoint.load_universal": _CHECKPOINT,
    "checkpoint.parallel_write": _CHECKPOINT,
    "checkpoint.checkpoint_serialization": _CHECKPOINT,
    "optimizer.legacy_fusion": _OWN,
    "optimizer.params.torch_adam": "Adam and AdamW are PyTorch's",
    "optimizer.params.fused": "optimizers are fused where PyTorch has them so",
    "fp16.auto_cast": "inputs are tokens",
    "bf16.immediate_grad_update": _OWN,
    "bfloat16.immediate_grad_update": _OWN,
    "activation_checkpointing.contiguous_memory_optimization": "the allocator places activations",
    "activation_checkpointing.synchronize_checkpoint_boundary": _OWN,
    "activation_checkpointing.profile": _LOG,
    "pipeline.seed_layers": "random numbers go by names and places",
    "pipeline.pipe_partitioned": _OWN,
    "pipeline.grad_partitioned": _OWN,
    "zero_optimization.parameter_alignment": _OWN,
    "zero_optimization.stage3_max_reuse_distance": _UNITS,
    "zero_optimization.stage3_module_granularity_threshold": _UNITS,
    "zero_optimization.leaf_module": _UNITS,
    "zero_optimization.override_module_apply": _OWN,
    "zero_optimization.save_muon_momentum_buffer_in_memory": _OWN,
}
"""Key, with those of the blocks around it, to the reason. All others are used or refused."""
