"""The families of models whose config.json is read and written, by ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from trainwright.integration.hugging_face.dense_families import (
    read_gpt2,
    read_llama,
    read_mistral,
    read_qwen2,
    read_qwen3,
    write_gpt2,
    write_llama,
    write_mistral,
    write_qwen,
)
from trainwright.integration.hugging_face.keys import Keys
from trainwright.integration.hugging_face.names import (
    DEEPSEEK_NAMES,
    GPT2_NAMES,
    MIXTRAL_NAMES,
    PLAIN_NAMES,
    QWEN_NAMES,
    Naming,
)
from trainwright.integration.hugging_face.sparse_families import (
    read_deepseek_v3,
    read_dots1,
    read_mixtral,
    read_qwen2_moe,
    read_qwen3_moe,
    write_deepseek_v3,
    write_dots1,
    write_mixtral,
    write_qwen_moe,
)
from trainwright.integration.model import ModelShape


@attrs.frozen
class Family:
    """How one ``model_type`` says what a model is.

    Args:
        architecture: the class of transformers.
        naming: of the tensors in its files.
        read: what makes a shape of the keys.
        write: what makes keys of a shape.
        sparse: whether it has experts.
    """

    architecture: str
    naming: Naming
    read: Callable[[Keys], ModelShape]
    write: Callable[[ModelShape], dict[str, Any]]
    sparse: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", PLAIN_NAMES, read_llama, write_llama),
    "mistral": Family("MistralForCausalLM", PLAIN_NAMES, read_mistral, write_mistral),
    "qwen2": Family("Qwen2ForCausalLM", PLAIN_NAMES, read_qwen2, write_qwen),
    "qwen3": Family("Qwen3ForCausalLM", PLAIN_NAMES, read_qwen3, write_qwen),
    "gpt2": Family("GPT2LMHeadModel", GPT2_NAMES, read_gpt2, write_gpt2),
    "mixtral": Family("MixtralForCausalLM", MIXTRAL_NAMES, read_mixtral, write_mixtral, True),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", QWEN_NAMES, read_qwen2_moe, write_qwen_moe, True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", QWEN_NAMES, read_qwen3_moe, write_qwen_moe, True),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", DEEPSEEK_NAMES, read_deepseek_v3, write_deepseek_v3, True
    ),
    "dots1": Family("Dots1ForCausalLM", DEEPSEEK_NAMES, read_dots1, write_dots1, True),
}
"""By ``model_type``."""
