"""The blocks ``activation_checkpointing`` and ``pipeline``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.integration.config import RunConfig
from trainwright.integration.deepspeed.draft import AUTO, Draft, Word, only, translate, truth, whole
from trainwright.integration.errors import ConfigError


def activation_checkpointing(draft: Draft, key: str, block: Any) -> None:
    """Read ``activation_checkpointing``.

    Where something is said of what checkpoints keep, layers are recomputed; in DeepSpeed the
    model's code asks for that.
    """
    translate(draft, _WORDS, block, key)
    if not any(block.get(name) for name in _WORDS):
        draft.notes.append(f"{key} asks for nothing: --recompute says what is computed again")


def pipeline(draft: Draft, key: str, block: Any) -> None:
    """Read ``pipeline``."""
    translate(draft, _PIPELINE, block, key)


def _number(draft: Draft, key: str, value: Any) -> None:
    count = whole(1)(key, value)
    layers = RunConfig.of(**draft.flags).model.shape.layers
    if count > layers:
        raise ConfigError(f"{key}={count} must be at most the model's {layers} layers")
    draft.say("recompute", f"every-{-(-layers // count)}", key)


def _partition(draft: Draft, key: str, value: Any) -> None:
    if not truth(key, value):
        return
    draft.imply("recompute", "full")
    if RunConfig.of(**draft.flags).parallel.mesh.tp > 1:
        draft.say("sequence_parallel", True, key)
    else:
        draft.notes.append(f"{key} has no effect with tp=1: nobody shares activations")


def _on_cpu(draft: Draft, key: str, value: Any) -> None:
    if truth(key, value):
        draft.imply("recompute", "full")
        draft.say("offload_activations", "cpu", key)


def _interval(draft: Draft, key: str, value: Any) -> None:
    every = whole(0)(key, value)
    if every:
        draft.say("recompute", "full" if every == 1 else f"every-{every}", key)


def _stages(draft: Draft, key: str, value: Any) -> None:
    ranks = RunConfig.of(**draft.flags).parallel.mesh.pp
    if value != AUTO and whole(1)(key, value) != ranks:
        raise ConfigError(f"{key} says {value} and --layout has pp={ranks}; say one of them")


_WORDS: Mapping[str, Word] = {
    "partition_activations": _partition,
    "cpu_checkpointing": _on_cpu,
    "number_checkpoints": _number,
}
_PIPELINE: Mapping[str, Word] = {
    "stages": _stages,
    "partition": only("best", "--first-stage-layers and --last-stage-layers say otherwise"),
    "activation_checkpoint_interval": _interval,
}
