"""The command that says what memory a run will take."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from trainwright.integration.cli import main
from trainwright.integration.config import RunConfig
from trainwright.integration.devices import DEVICES, named_device
from trainwright.integration.errors import ConfigError
from trainwright.integration.estimate_memory import ChunkBytes, in_flight, memory_of_rank
from trainwright.integration.model import PRESETS
from trainwright.integration.stepping import make_schedule

LLAMA_405B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
LARGE = [
    *("--layout", "dp=64,tp=8,pp=16", "--zero", "1", "--dtype", "bfloat16"),
    *("--sequence-length", "8192", "--micro-batch", "1", "--microbatches", "32"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_405B))
    return tmp_path


def estimated(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["estimate", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_a_preset_is_estimated_rank_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--layout", "dp=2,pp=2", "--microbatches", "4"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny: 0.000853 billion parameters; dp=2,pp=2 (4 ranks), zero 0;")
    assert [line.split(":")[0] for line in lines[2:]] == ["pp 0", "pp 1"]
    assert len(lines) == 4


def test_a_model_of_405_billion_parameters_is_estimated_from_its_config(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    code, found = estimated(capsys, "--model", str(folder), "--device", "h100", *LARGE)

    assert code == 1
    assert found["parameters"] == 405_853_388_800
    assert (found["device"], found["fits"], found["world_size"]) == ("H100 SXM", False, 8192)
    assert [each["layers"] for each in found["ranks"][:2]] == [[[0, 8]], [[8, 16]]]
    first, last = found["ranks"][0], found["ranks"][-1]
    # Sixteen microbatches wait on the first rank, one on the last.
    assert first["activations"] > 15 * last["activations"]
    assert first["logits"] == 0 < last["logits"]
    assert first["total"] == found["most"]
    kinds = [value for name, value in first.items() if isinstance(value, int)]
    assert sum(kinds) - first["pipeline_rank"] - first["rank"] == 2 * first["total"]


def test_settings_that_would_fit_are_named_where_those_asked_for_do_not(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    words = ["--model", str(folder / "config.json"), "--device", "H100", *LARGE]
    _, found = estimated(capsys, *words)

    [change] = found["changes"]
    assert change["settings"] == {"recompute": "full"}
    code, changed = estimated(capsys, *words, "--recompute", "full")
    assert code == 0
    assert changed["most"] == change["most"] <= changed["device_bytes"]


def test_where_no_change_fits_the_one_that_holds_least_says_what_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["estimate", "--layout", "dp=2", "--device", "V100", "--memory", "0.001"]

    assert main(words) == 1

    lines = capsys.readouterr().out.splitlines()
    assert "does not fit V100 32 GB of 0.001 GB" in lines[-2]
    assert "--recompute full" in lines[-1]
    assert "without --microbatches" in lines[-1]
    assert "None" not in lines[-1]
    assert "still" in lines[-1]


def test_states_leave_the_device_only_where_nothing_else_is_left_to_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--layout", "dp=1", "--recompute", "full", "--device", "V100", "--micro-batch", "1"]
    words += ["--global-batch", "1", "--reserve", "0"]
    _, found = estimated(capsys, *words)
    limit = str((found["most"] - 1) / 1e9)

    _, changed = estimated(capsys, *words, "--memory", limit)

    [change] = changed["changes"]
    assert change["settings"] == {"offload": "optimizer"}
    assert change["most"] <= changed["device_bytes"]
    assert main(["estimate", *words, "--memory", limit, "--offload", "optimizer"]) == 0


def test_the_picture_is_a_file_with_the_devices_limit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "memory.svg"

    assert main(["estimate", "--layout", "pp=2", "--device", "A100", "--picture", str(path)]) == 0

    texts = [element.text for element in ET.parse(path).iter() if element.text]
    assert "pp 1: layers 2-3" in texts
    assert "fits A100 SXM 80 GB of 80 GB" in capsys.readouterr().out


def test_a_preset_has_the_tokens_of_the_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = estimated(capsys, "--tokenizer", "ids:1000")

    assert found["parameters"] == PRESETS["tiny"].num_parameters + 2 * (1000 - 256) * 128


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--recompute", "budget:1MiB"], "--recompute budget:1MiB is not estimated"),
        (["--zero", "1", "--offload", "parameters"], "--offload parameters needs --zero 3"),
        (["--optimizer", "muon"], "--optimizer muon"),
        (["--dtype", "fp8-current"], "bfloat16 is"),
        (["--offload-activations", "cpu"], "upper bound"),
        (["--device", "H1000"], "did you mean"),
        (["--memory", "-1"], "--memory must be positive"),
        (["--memory", "inf"], "--memory must be positive and finite"),
        (["--reserve", "1"], "--reserve must be from 0 to below 1"),
        (["--layout", "tp=8"], "tp up to 4 works"),
        (["--picture", "/nowhere/at/all.svg"], "cannot be written"),
    ],
)
def test_what_is_not_estimated_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["estimate", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_command_line_of_very_many_words_is_refused_before_it_is_parsed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["estimate", *["--zero", "1"] * 50_000]) == 2
    assert "has 100,001 words, at most 5,000" in capsys.readouterr().err


def test_full_recomputation_is_not_priced_as_none() -> None:
    kept, again = (
        memory_of_rank(
            RunConfig.of(layout="pp=4", microbatches=8, global_batch=8, recompute=way),
            PRESETS["tiny"],
            0,
        )
        for way in ("none", "full")
    )

    assert again.activations < kept.activations / 2
    assert again.model_states == kept.model_states


@pytest.mark.parametrize(("microbatches", "held"), [(8, [4, 3, 2, 1]), (2, [2, 2, 2, 1])])
def test_stages_of_1f1b_hold_as_many_microbatches_as_come_before_a_backward(
    microbatches: int, held: list[int]
) -> None:
    config = RunConfig.of(layout="pp=4", microbatches=microbatches, global_batch=microbatches)
    schedule = make_schedule(config)

    found = [
        max(sum(each.held) for each in in_flight(schedule, rank, [rank], [ChunkBytes(1, 1)]))
        for rank in range(4)
    ]

    assert found == held


def test_devices_are_found_by_the_beginnings_of_their_names() -> None:
    assert named_device("h100").name == "H100 SXM"
    assert named_device("gh200-144").name == "GH200 144 GB"
    assert named_device("Tesla V100-SXM2-32GB").name == "V100 32 GB"
    assert all(named_device(device.name) == device for device in DEVICES)
    with pytest.raises(ConfigError, match="unknown device ''"):
        named_device("")
