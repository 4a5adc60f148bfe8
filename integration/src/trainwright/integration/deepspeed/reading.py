"""A configuration of DeepSpeed as leaves of the settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from trainwright.integration.config import RunConfig
from trainwright.integration.deepspeed.activations import activation_checkpointing, pipeline
from trainwright.integration.deepspeed.draft import (
    AUTO,
    Draft,
    Word,
    off,
    only,
    refused,
    sets,
    shown,
    translate,
    truth,
    whole,
)
from trainwright.integration.deepspeed.formats import bf16, fp16
from trainwright.integration.deepspeed.tolerant import parse_tolerantly
from trainwright.integration.deepspeed.training import clipping, optimizer, scheduler
from trainwright.integration.deepspeed.zero import zero_optimization
from trainwright.integration.errors import ConfigError
from trainwright.integration.outside_files import read_text
from trainwright.integration.values import option


@attrs.frozen
class Reading:
    """What a configuration means.

    Args:
        leaves: of the settings, those that were set elsewhere among them.
        notes: a line on each key that has no effect, with the reason.
    """

    leaves: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def config(self) -> RunConfig:
        """The settings."""
        return RunConfig.of(**self.leaves)


def read_deepspeed(
    source: Mapping[str, Any] | str | Path,
    flags: Mapping[str, Any] | None = None,
    *,
    drop_offload: bool = False,
) -> Reading:
    """Read a configuration of DeepSpeed 0.19.

    What a block leaves out is what DeepSpeed takes it for, unless ``flags`` say something. Keys
    that are missing, and "auto", leave things to flags and defaults. Learning rates are those of
    DeepSpeed, update for update; loss scales grow one clean step earlier.

    Args:
        source: a file, JSON with comments and commas behind last elements, or what it holds.
        flags: leaves that are set elsewhere, such as by options.
        drop_offload: leave out what moves weights and states off the device, instead of an error.

    Raises:
        ConfigError: the file cannot be read, a key is unknown (the nearest is named), refused or
            has a value that is not allowed, or says otherwise than a flag, with both values.
    """
    named = "the configuration" if isinstance(source, Mapping) else str(source)
    draft = Draft(dict(flags or {}), drop_offload)
    try:
        block = source if isinstance(source, Mapping) else _from_file(Path(source))
        if isinstance(block, Mapping) and {"bf16", "bfloat16"} <= block.keys():
            raise ConfigError("bf16 is there twice, once as bfloat16; keep one")
        translate(draft, _WORDS, block)
        leaves = {**draft.flags, **draft.leaves()}
        _check(draft, leaves)
    except ConfigError as error:
        raise ConfigError(f"{named}: {error}") from error
    return Reading(leaves, tuple(draft.notes))


def _check(draft: Draft, leaves: Mapping[str, Any]) -> None:
    try:
        RunConfig.of(**leaves)
    except ConfigError as error:
        # It names options; the file has other words for them.
        words = str(error).split()
        keys = [key for leaf, (_, key) in draft.said.items() if option(leaf) in words]
        raise ConfigError(f"{', '.join(keys)}: {error}" if keys else str(error)) from error


def _from_file(path: Path) -> Any:
    try:
        return parse_tolerantly(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "cannot be read as JSON, in which there may be comments and commas behind last "
            f"elements: {error}"
        ) from error


def _communication(draft: Draft, key: str, value: Any) -> None:
    dtypes = {"fp32": None, "fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16"}
    if value == AUTO:
        return
    if not isinstance(value, str) or value not in dtypes:
        raise ConfigError(f"{key} must be one of fp32, fp16, bf16, got {shown(value)}")
    if dtypes[value] is not None:
        draft.say("reduce_dtype", dtypes[value], key)
    else:
        draft.agrees("reduce_dtype", "float32", key)


def _tensorboard(draft: Draft, key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a block, got {shown(value)}")
    known = {"enabled": sets("tensorboard", truth), "output_path": _noted, "job_name": _noted}
    translate(draft, known, value, key)


def _noted(draft: Draft, key: str, value: Any) -> None:
    draft.notes.append(f"{key} is ignored: events are written to the run folder")


def _sequence_ranks(draft: Draft, key: str, value: Any) -> None:
    ranks = RunConfig.of(**draft.flags).parallel.mesh.cp
    if value != AUTO and whole(1)(key, value) != ranks:
        raise ConfigError(f"{key} says {value} and --layout has cp={ranks}; say one of them")


_REMOVED = refused("it is gone from DeepSpeed as well")
_WORDS: Mapping[str, Word] = {
    "train_batch_size": sets("global_batch", whole(1)),
    "train_micro_batch_size_per_gpu": sets("micro_batch", whole(1)),
    "gradient_accumulation_steps": sets("microbatches", whole(1)),
    "managed_gradient_accumulation": only(True, "a step takes all of its microbatches"),
    "gradient_clipping": clipping,
    "gradient_allreduce_op": only("mean", "losses are means over the tokens of the batch"),
    "communication_data_type": _communication,
    "fp16": fp16,
    "bf16": bf16,
    "bfloat16": bf16,
    "optimizer": optimizer,
    "scheduler": scheduler,
    "zero_optimization": zero_optimization,
    "activation_checkpointing": activation_checkpointing,
    "pipeline": pipeline,
    "sequence_parallel_size": _sequence_ranks,
    "tensorboard": _tensorboard,
    "csv_monitor": off("metrics.jsonl holds every step"),
    "wandb": off("metrics.jsonl holds every step"),
    "comet": off("metrics.jsonl holds every step"),
    "comms_logger": off("the report says what ranks wait for"),
    "flops_profiler": off("the report says how many FLOPs a step has"),
    "torch_autocast": off("--dtype says the format of products"),
    "hybrid_engine": off("there is no engine of its own to generate with"),
    "data_efficiency": off("batches grow by --ramp-from"),
    "autotuning": off("nothing is tuned by trial runs"),
    "compile": off("layers run as they are", "deepcompile"),
    "expert_parallel": off("say ep in --layout"),
    "data_types": refused("gradients are at least float32; --dtype says the rest"),
    "tensor_parallel": refused("say tp in --layout"),
    "checkpoint": lambda draft, key, value: translate(draft, _CHECKPOINT, value, key),
    **dict.fromkeys(
        (
            "amp",
            "compression_training",
            "curriculum_learning",
            "eigenvalue",
            "elasticity",
            "graph_harvesting",
            "nebula",
            "progressive_layer_drop",
            "quantize_training",
            "sparse_attention",
            "sparse_gradients",
        ),
        _REMOVED,
    ),
}
_CHECKPOINT: Mapping[str, Word] = {
    "use_node_local_storage": only(False, "checkpoints lie where all ranks see them"),
    "writer": refused("--async-save writes while steps go on"),
}
