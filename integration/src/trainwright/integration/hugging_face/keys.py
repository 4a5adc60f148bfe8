"""What a config.json says, read so that nothing in it is passed over."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from trainwright.integration.errors import ConfigError

IGNORABLE = {
    "_attn_implementation": "which kernel transformers takes",
    "_name_or_path": "where the model came from",
    "add_cross_attention": "of encoder-decoder models; refused where it is true",
    "architectures": "the class of transformers; model_type says the same",
    "attention_dropout": "of training; there is no dropout here",
    "attn_pdrop": "of training; there is no dropout here",
    "auto_map": "code beside the weights, which is never run",
    "bos_token_id": "of generation",
    "chunk_size_feed_forward": "how transformers saves memory",
    "dtype": "the dtype of the file, which the tensors say themselves",
    "embd_pdrop": "of training; there is no dropout here",
    "eos_token_id": "of generation",
    "ep_size": "a layout of other software",
    "gradient_checkpointing": "how transformers saves memory",
    "id2label": "of classifiers",
    "initializer_range": "of initial weights",
    "is_decoder": "always so here",
    "is_encoder_decoder": "refused where it is true",
    "label2id": "of classifiers",
    "moe_layer_freq": "which layers have experts; refused where it is not 1",
    "num_nextn_predict_layers": "layers that predict further tokens; they are left out",
    "output_attentions": "what transformers returns",
    "output_hidden_states": "what transformers returns",
    "output_past": "what transformers returns",
    "output_router_logits": "what transformers returns",
    "pad_token_id": "of generation",
    "pretraining_tp": "a layout of other software",
    "problem_type": "of classifiers",
    "resid_pdrop": "of training; there is no dropout here",
    "return_dict": "what transformers returns",
    "router_aux_loss_coef": "of another balance loss than the one that runs have",
    "aux_loss_alpha": "of another balance loss than the one that runs have",
    "seq_aux": "of another balance loss than the one that runs have",
    "summary_activation": "of classifiers",
    "summary_first_dropout": "of classifiers",
    "summary_proj_to_labels": "of classifiers",
    "summary_type": "of classifiers",
    "summary_use_proj": "of classifiers",
    "task_specific_params": "of generation",
    "tokenizer_class": "of the tokenizer",
    "torch_dtype": "the dtype of the file, which the tensors say themselves",
    "torchscript": "how transformers runs",
    "transformers_version": "who wrote the file",
    "use_bfloat16": "how transformers runs",
    "use_cache": "of generation",
    "vocab_file": "of the tokenizer",
}
"""Keys that change nothing of what is computed here, each with the reason; all others are read."""

_BEYOND = 1 << 31
_LARGEST = sys.float_info.max


class Keys:
    """The entries of a config.json, each asked for by name.

    Args:
        values: What the file holds.
        source: The file, for messages.
        ignore: Keys that the user has said may be passed over.
    """

    def __init__(
        self, values: Mapping[str, Any], source: str, ignore: Collection[str] = ()
    ) -> None:
        self._values = dict(values)
        self._left = set(values) - set(ignore)
        self.source = source

    def number(self, name: str, default: float | None = None) -> int:
        """Return a whole number; ``default`` where it is missing or null."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            self.refuse(f"{name} must be a whole number, got {value!r}")
        if abs(value) >= _BEYOND:
            self.refuse(f"{name} must be below {_BEYOND}, got {value}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """Return a number; ``default`` where it is missing or null."""
        value = self._get(name, default)
        if type(value) not in (int, float) or abs(value) > _LARGEST or math.isnan(value):
            self.refuse(f"{name} must be a finite number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false; ``default`` where it is missing or null."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            self.refuse(f"{name} must be true or false, got {value!r}")
        return value

    def optional(self, name: str, missing: object = None) -> Any:
        """Return whatever is there, also null; ``missing`` where nothing is."""
        self._left.discard(name)
        return self._values.get(name, missing)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object; empty where it is missing or null."""
        value = self.optional(name)
        if value is not None and not isinstance(value, dict):
            self.refuse(f"{name} must be an object, got {value!r}")
        return dict(value or {})

    def only(self, name: str, *values: object) -> None:
        """Refuse a value that is none of those computed here; a missing one is the first."""
        found = self._get(name, values[0])
        if found not in values:
            wanted = " or ".join(map(repr, values))
            self.refuse(f"{name}={found!r} is not implemented; {wanted} is")

    def finish(self) -> dict[str, str]:
        """Return the reasons why the keys that are left change nothing.

        Raises:
            ConfigError: One of them might.
        """
        known = sorted(self._left & set(IGNORABLE))
        unknown = sorted(self._left - set(IGNORABLE))
        if unknown:
            shown = ", ".join(f"{name}={self._values[name]!r:.60}" for name in unknown)
            self.refuse(
                f"{shown}: not implemented; where it changes nothing of what the model computes, "
                "read it with ignore=(its name,)"
            )
        return {name: IGNORABLE[name] for name in known}

    def refuse(self, why: str) -> NoReturn:
        """Raise for what cannot be read.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{self.source}: {why}")

    def _get(self, name: str, default: object) -> Any:
        self._left.discard(name)
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            self.refuse(f"{name} is missing")
        return value
