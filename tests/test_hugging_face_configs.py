"""config.json is understood as transformers understands it, or refused by the name of the key."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers

from tests.hugging_face_models import CONFIGS
from trainwright.integration.errors import ConfigError
from trainwright.integration.flops import Products
from trainwright.integration.hugging_face import read_config, read_shape, write_config
from trainwright.integration.hugging_face.config import understand
from trainwright.integration.hugging_face.loading import parameter_shapes
from trainwright.integration.model import PRESETS, ExpertShape, ModelShape
from trainwright.sharding.expert import Routing


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    kind, sizes = CONFIGS[name]
    return {**getattr(transformers, kind)(**sizes).to_dict(), **changes}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_missing_key_is_what_transformers_takes_it_for_or_is_asked_for(name: str) -> None:
    kind = getattr(transformers, CONFIGS[name][0])
    whole = config_of(name)
    asked_for = []
    for key in whole:
        rest = {k: copy.deepcopy(v) for k, v in whole.items() if k not in (key, "layer_types")}
        if key == "model_type":
            continue
        try:
            ours = understand(rest).shape
        except ConfigError as error:
            asked_for.append((key, str(error)))
            continue
        theirs = understand(kind.from_dict(copy.deepcopy(rest)).to_dict()).shape
        assert ours == theirs, key
    for key, message in asked_for:
        # Of experts either name will do.
        assert key.replace("num_local_", "num_") in message.replace("num_local_", "num_")
        assert "is missing" in message
    assert len(asked_for) < 20


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_of_a_shape_is_read_as_it_again(name: str) -> None:
    shape = understand(config_of(name)).shape

    for like in (None, config_of(name, bos_token_id=7)):
        values = write_config(shape, torch.float32, like=like)
        assert understand(values).shape == shape
    assert values["bos_token_id"] == 7
    assert values["model_type"] == config_of(name)["model_type"]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parameters_of_every_family_are_counted(name: str) -> None:
    shape = understand(config_of(name)).shape
    sizes = parameter_shapes(shape)
    counted = [n for key, n in sizes.items() if not key.endswith("e_score_correction_bias")]

    assert shape.num_parameters == sum(math.prod(size) for size in counted)
    assert Products.of(shape).vectors >= 0


@pytest.mark.parametrize("preset", ["tiny", "tiny-tied", "small", "base"])
def test_presets_are_written_as_models_of_a_known_family(preset: str) -> None:
    assert write_config(PRESETS[preset], torch.float32)["model_type"] == "llama"


def test_old_and_new_forms_of_rotary_positions_are_one() -> None:
    new = config_of("llama3")
    rope = new.pop("rope_parameters")
    old = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": dict(rope)}
    older = {**old, "rope_scaling": {"type": rope["rope_type"], **rope}}
    older["rope_scaling"].pop("rope_type")

    assert understand({**new, **old}).shape == understand(config_of("llama3")).shape
    assert understand({**new, **older}).shape == understand(config_of("llama3")).shape


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": "bloom"}, "model_type='bloom' is not implemented; llama, mistral"),
        ("llama", {"model_type": None}, "model_type=None is not implemented"),
        ("llama", {"model_type": ["llama"]}, r"model_type=\['llama'\] is not implemented"),
        ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number, got nan"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
        ("llama", {"vocab_size": 10**15}, "vocab_size must be below 2147483648, got 10000000"),
        ("llama", {"num_hidden_layers": 10**9}, "layers must be at most 100,000"),
        ("llama", {"logit_scale": 0.5}, "logit_scale=0.5: not implemented; .*ignore="),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: quantised"),
        ("llama", {"hidden_act": "tanh"}, "hidden_act='tanh' is not implemented; 'silu' or"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not implemented"),
        ("llama", {"hidden_size": "32"}, "hidden_size must be a whole number, got '32'"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        (
            "llama",
            {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None},
            "width=32 must be an even number of features",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type='dynamic' is not implemented; default, linear, llama3, yarn are",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor=0.25 is not implemented",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "short_factor": [1]}},
            "rope: short_factor=.*: not implemented",
        ),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False is not implemented"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True is not implemented"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not implemented"),
        ("mixtral", {"num_experts_per_tok": 9}, "top_k=9 experts of a token"),
        ("qwen2-moe", {"qkv_bias": False}, "qkv_bias=False is not implemented; True is"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func='softmax' is not implemented"),
    ],
)
def test_what_would_change_the_computation_and_is_not_there_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        understand(config_of(name, **changes))


def test_an_unknown_key_can_be_passed_over_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama", note="mine")))
    with pytest.raises(ConfigError, match="note='mine': not implemented"):
        read_shape(tmp_path)

    found = read_config(tmp_path, ignore=("note",))

    assert found.shape == understand(config_of("llama")).shape
    assert found.ignored["attention_dropout"].startswith("of training")


@pytest.mark.parametrize("text", [None, "", "[1]", "{"])
def test_a_folder_without_a_config_that_can_be_read_is_refused(
    text: str | None, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        (PRESETS["tiny-moe"], "qwen2_moe: it has shared_gate=True, not False"),
        (ModelShape(norm="layer"), "gpt2: config.json: n_positions is missing"),
        (ModelShape(qkv_bias=True, mlp_bias=True), "llama: it has output_bias=True, not"),
        (
            ModelShape(experts=ExpertShape(Routing(4, 2, capacity_factor=2.0), 8)),
            r"mixtral: it has capacity_factor=None, not 2\.0",
        ),
    ],
)
def test_a_model_that_no_family_has_is_not_written_as_another(shape: ModelShape, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        write_config(shape, torch.float32)


def test_windows_count_where_the_file_says_that_they_are_used() -> None:
    assert understand(config_of("mistral")).shape.window == 40
    assert understand(config_of("mistral", sliding_window=None)).shape.window is None
    unused = config_of("qwen2", sliding_window=16)
    assert understand(unused).shape.window is None
    used = {**unused, "use_sliding_window": True}
    assert understand(used).shape.window is None
    del used["layer_types"]
    assert understand(used).shape.window is None
    assert understand({**used, "max_window_layers": 1}).shape.window == 16


def test_a_shape_checks_itself() -> None:
    sparse = PRESETS["tiny-moe"]
    for changes, message in [
        ({"positions": "learned"}, "needs max_positions"),
        ({"norm": "batch"}, "norm must be one of rms, layer"),
        ({"activation": "tanh"}, "activation must be one of silu"),
        ({"window": 0}, "window must be positive"),
        ({"head_features": 5}, "even head_features"),
        ({"width": 130}, "or head_features"),
        ({"dense_layers": (1,)}, "dense_layers"),
        ({"kv_heads": 3}, "multiple of kv_heads=3"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ModelShape(**changes)
    for layers in ((4,), range(4)):
        with pytest.raises(ConfigError, match="dense_layers"):
            attrs.evolve(sparse, dense_layers=layers)
