"""A configuration of DeepSpeed is used, ignored for a reason in the table, or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trainwright.integration.cli import main
from trainwright.integration.config import RunConfig
from trainwright.integration.deepspeed import IGNORED, parse_tolerantly, read_deepspeed
from trainwright.integration.errors import ConfigError
from trainwright.integration.foreign_rates import foreign_rate
from trainwright.integration.rates import learning_rate

ADAM = {"lr": 1e-4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 3e-7}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1, // one\n "b": [1, 2,], # two\n}', {"a": 1, "b": [1, 2]}),
        ('/* "a": 2, \n */ {"a": "// # /* , } no comment",}', {"a": "// # /* , } no comment"}),
        ('{"a": "\\"//", "b": 5e8}', {"a": '"//', "b": 5e8}),
        ("[1, /* , */ ]", [1]),
        ('[",", ]', [","]),
    ],
)
def test_json_may_hold_comments_and_commas_behind_last_elements(text: str, value: object) -> None:
    assert parse_tolerantly(text) == value


@pytest.mark.parametrize(
    "text",
    ["[,]", "{,}", "[1,,]", '{"a":,}', "{a: 1}", "{'a': 1}", '{"a": 1} x', "/* [1]", '["a]', ""],
)
def test_what_is_no_json_even_so_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_tolerantly(text)


@pytest.mark.parametrize(
    ("block", "leaves"),
    [
        ({"train_batch_size": 64}, {"global_batch": 64}),
        ({"train_micro_batch_size_per_gpu": 8.0}, {"micro_batch": 8}),
        ({"gradient_accumulation_steps": 4}, {"microbatches": 4}),
        ({"gradient_clipping": 0.5}, {"clip": 0.5}),
        ({"gradient_clipping": -1}, {"clip": 0.0}),
        ({"gradient_clipping": None}, {}),
        ({"communication_data_type": "bf16"}, {"reduce_dtype": "bfloat16"}),
        ({"bf16": {"enabled": True}}, {"dtype": "bfloat16"}),
        ({"bfloat16": {"enabled": True}}, {"dtype": "bfloat16"}),
        ({"bf16": {"enabled": "auto"}}, {}),
        (
            {"fp16": {"enabled": True}},
            {"dtype": "float16", "scale_window": 1000, "hysteresis": 2, "initial_scale": 65536.0},
        ),
        (
            {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 0,
                    "initial_scale_power": 4,
                    "loss_scale_window": 7,
                    "hysteresis": 3,
                    "consecutive_hysteresis": True,
                    "min_loss_scale": 2,
                }
            },
            {
                "dtype": "float16",
                "initial_scale": 16.0,
                "scale_window": 7,
                "hysteresis": 3,
                "hysteresis_refills": True,
                "min_scale": 2.0,
            },
        ),
        ({"zero_optimization": {"stage": 1}}, {"zero": 1}),
        ({"zero_optimization": {"stage": 2}}, {"zero": 2, "reduce": "microbatch"}),
        (
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "overlap_comm": False}},
            {"zero": 1, "bucket_bytes": 2_000_000_000, "overlap": False},
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": 9, "allgather_bucket_size": 8}},
            {"zero": 0, "bucket_bytes": 32},
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}},
            {"zero": 3, "reduce": "microbatch", "live_units": 1},
        ),
        (
            {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 5e8}},
            {"zero": 3, "reduce": "microbatch", "live_units": 4},
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 5e5}},
            {"zero": 3, "reduce": "microbatch", "live_units": 2},
        ),
        (
            {"optimizer": {"type": "Adam", "params": ADAM}},
            {"optimizer": "adamw", "lr": 1e-4, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
            | {"weight_decay": 3e-7},
        ),
        (
            {"optimizer": {"type": "adam", "params": {"adam_w_mode": False}}},
            {"optimizer": "adam", "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
            | {"weight_decay": 0.0},
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}},
            {"optimizer": "sgd", "lr": 0.1, "momentum": 0.5, "weight_decay": 0.0},
        ),
        (
            {"activation_checkpointing": {"number_checkpoints": 2, "cpu_checkpointing": True}},
            {"recompute": "every-2", "offload_activations": "cpu"},
        ),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            {"recompute": "full", "offload_activations": "cpu"},
        ),
        ({"pipeline": {"activation_checkpoint_interval": 1}}, {"recompute": "full"}),
        ({"tensorboard": {"enabled": True}}, {"tensorboard": True}),
        ({"wandb": {"enabled": False, "team": "x"}}, {}),
    ],
)
def test_a_key_sets_what_it_means_here(block: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    assert read_deepspeed(block).leaves == leaves


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"gradient_clippin": 1.0}, "unknown key gradient_clippin; did you mean gradient_clipping"),
        ({"zero_optimization": {"stag": 1}}, "did you mean zero_optimization.stage"),
        ({"activation_checkpointing": {"cpu": True}}, "unknown key activation_checkpointing.cpu"),
        ({"optimizer": {"type": "Adam", "params": {"beta": 1}}}, "did you mean optimizer.params"),
        ({"bf16": {"enabled": False, "loss_scale": 0}}, "unknown key bf16.loss_scale"),
        ({"zero_optimization": None}, "zero_optimization must be a block, got null"),
        ({"zero_optimization": True}, 'must be a block such as {"stage": 2}'),
        ({"zero_optimization": {"stage": "auto"}}, 'stage="auto" needs --zero'),
        ({"zero_optimization": {"stage": 4}}, "must be 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": {"reduce_bucket_size": 1509949.4}}, "a whole number from 0"),
        (
            {"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}},
            "stage3_prefetch_bucket_size twice",
        ),
        ({"zero_optimization": {"contiguous_gradients": False}}, "must be true, got false"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer to nvme needs nvme_path",
        ),
        ({"zero_optimization": {"mics_shard_size": 2}}, "dp_shard=M"),
        ({"train_batch_size": "8"}, "train_batch_size must be a finite number, got '8'"),
        ({"train_batch_size": 0}, "a whole number from 1, got 0"),
        ({"train_batch_size": True}, "must be a finite number, got true"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled says float16 and"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale must be from 0"),
        ({"optimizer": {"type": "Lamb"}}, "'Lamb' is not available"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "say gradient_clipping"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.params must be a block"),
        ({"scheduler": {"type": "Warmup", "params": {}}}, "did you mean 'WarmupLR'"),
        ({"scheduler": {"type": [], "params": {}}}, "scheduler.type [] is not available"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1.5}}},
            "whole number from 1, got 1.5",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "sin"}}}, "log, linear"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "needs total_num_steps"),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}},
            "cycle_momentum=True is not available",
        ),
        ({"amp": {"enabled": False}}, "amp is not available: it is gone"),
        ({"wandb": {"enabled": True}}, "wandb is not available"),
        ({"data_types": {}}, "at least float32"),
    ],
)
def test_what_is_unknown_or_has_no_counterpart_is_refused(
    block: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_deepspeed(block)
    assert message in str(caught.value)


def test_every_key_that_is_ignored_has_a_reason_which_is_told() -> None:
    for path, reason in IGNORED.items():
        *blocks, key = path.split(".")
        block: dict[str, Any] = {key: 1}
        for name in reversed(blocks):
            extra = {"type": "SGD"} if name == "optimizer" else {}
            block = {name: {**block, **extra, **({"enabled": True} if "16" in name else {})}}

        assert any(path in note and reason in note for note in read_deepspeed(block).notes), path


@pytest.mark.parametrize(
    ("block", "flags", "words"),
    [
        (
            {"gradient_accumulation_steps": 4},
            {"microbatches": 2},
            ["gradient_accumulation_steps says 4", "--microbatches says 2"],
        ),
        ({"gradient_clipping": 1.0}, {"clip": 0.5}, ["says 1.0", "--clip says 0.5"]),
        ({"bf16": {"enabled": False}}, {"dtype": "bfloat16"}, ["bf16.enabled says false"]),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 20}}},
            {"steps": 10},
            ["total_num_steps says 20", "--steps says 10"],
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.99]}}},
            {"beta2": 0.95},
            ["betas says 0.99", "--beta2 says 0.95"],
        ),
    ],
)
def test_a_value_that_contradicts_an_option_is_refused_with_both(
    block: Mapping[str, Any], flags: Mapping[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_deepspeed(block, flags)
    for word in words:
        assert word in str(caught.value)


def test_auto_and_what_is_missing_are_what_options_say() -> None:
    flags = {"microbatches": 2, "clip": 0.5, "lr": 3e-4, "beta2": 0.98, "zero": 2, "steps": 10}
    block = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto", "eps": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
    }

    config = read_deepspeed(block, {**flags, "layout": "dp=2", "warmup": 4}).config

    assert (config.sizes.global_batch, config.sizes.microbatches) == (16, 2)
    assert (config.optimizer.clip, config.parallel.zero) == (0.5, 2)
    assert (config.optimizer.beta1, config.optimizer.beta2) == (0.9, 0.98)
    rates = learning_rate(config.rate, config.optimizer.lr, config.steps)
    shares = [0, 0, 0.25, 0.5, 0.75, 6 / 6, 5 / 6, 4 / 6, 3 / 6, 2 / 6]
    assert [rates(update) for update in range(10)] == pytest.approx([3e-4 * s for s in shares])


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        (
            "WarmupLR",
            {"warmup_num_steps": 4, "warmup_type": "linear"},
            [0, 0, 1 / 4, 2 / 4, 3 / 4, 1],
        ),
        ("WarmupLR", {"warmup_num_steps": 4}, [0, 0, 0.5, 0.7924812504, 1, 1]),
        (
            "WarmupLR",
            {"warmup_min_lr": 0.5, "warmup_max_lr": 2.5, "warmup_num_steps": 1},
            [0.5, 0.5, 2.5, 2.5],
        ),
        (
            "WarmupDecayLR",
            {"total_num_steps": 5, "warmup_num_steps": 2, "warmup_max_lr": 3.0}
            | {"warmup_type": "linear"},
            [0, 0, 1.5, 3, 2, 1, 0, 0],
        ),
        (
            "WarmupCosineLR",
            {"total_num_steps": 4, "warmup_num_steps": 2, "cos_min_ratio": 0.2}
            | {"warmup_min_ratio": 0.4, "warmup_type": "linear"},
            [0, 0.4, 0.7, 0.6, 0.2, 0.2, 0.2],
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 1, "cycle_max_lr": 3, "cycle_first_step_size": 2}
            | {"cycle_momentum": False, "decay_step_size": 2, "decay_lr_rate": 1.0},
            [1, 2, 3, 2, 1, 1 / 1.5, 1 / 2],
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0, "cycle_max_lr": 4, "cycle_first_step_size": 4}
            | {"cycle_second_step_size": 2, "cycle_first_stair_count": 2, "cycle_momentum": False},
            [0, 0, 2, 2, 4, 2, 0, 0],
        ),
        (
            "LRRangeTest",
            {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 2},
            [1, 1.5, 2, 2.5],
        ),
        (
            "LRRangeTest",
            {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 2}
            | {"lr_range_test_staircase": True},
            [1, 1, 2, 2],
        ),
    ],
)
def test_a_schedule_has_the_rates_of_deepspeed_update_for_update(
    kind: str, params: Mapping[str, Any], expected: list[float]
) -> None:
    schedule = foreign_rate(json.dumps({"type": kind, "params": params}))
    rates = [schedule.at(update, lr=1.0, steps=99) for update in range(len(expected))]
    assert rates == pytest.approx(expected)


def test_a_schedule_beside_another_rise_is_refused() -> None:
    text = json.dumps({"type": "WarmupLR", "params": {}})
    with pytest.raises(ConfigError, match="--warmup 5 has no effect with --scheduler"):
        RunConfig.of(scheduler=text, warmup=5)


TEXTBOOK = """{
  // what a first page shows
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu"},
    "overlap_comm": true,
    "contiguous_gradients": true,
    "reduce_bucket_size": 5e8,  # elements
  },
}
"""


def _train(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    given = ["--threads-as-ranks", "--layout", "dp=2", "--steps", "2", "--sequence-length", "16"]
    given += ["--evaluate-sequences", "2", "--sample-bytes", "0", "--measure-every", "0"]
    data = folder / "book.txt"
    data.write_text("".join(f"line {number} of the book\n" for number in range(400)))
    out = folder / "run"

    code = main(["train", *given, "--data", str(data), "--out", str(out), *arguments])

    assert code == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    computed = ("loss", "grad_norm", "lr", "tokens", "held_out_loss")
    return [{name: line[name] for name in computed if name in line} for line in lines]


def _weights_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    exported = folder.parent / "exported"
    assert main(["export", str(folder), str(exported), "--step", str(step)]) == 0
    return load_file(exported / "model.safetensors")


def test_the_offload_blocks_of_the_textbook_sample_can_be_dropped() -> None:
    path = parse_tolerantly(TEXTBOOK)

    kept, dropped = (read_deepspeed(path, drop_offload=drop) for drop in (False, True))

    assert kept.config.parallel.offload == "parameters"
    assert dropped.config.parallel.offload == "none"
    assert any("offload_param to parameters is dropped" in note for note in dropped.notes)


@pytest.mark.parametrize(
    ("block", "offload"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}, "optimizer"),
        ({"stage": 2, "cpu_offload": True}, "optimizer"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "none"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "parameters"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, "optimizer"),
        ({"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, "nvme:/x"),
        (
            {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
                "offload_param": {"device": "cpu"},
            },
            "nvme:/x",
        ),
    ],
    ids=str,
)
def test_offload_blocks_say_what_does_not_stay_on_the_device(
    block: dict[str, Any], offload: str
) -> None:
    assert read_deepspeed({"zero_optimization": block}).config.parallel.offload == offload


def test_an_offload_block_contradicts_an_option() -> None:
    block = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}

    with pytest.raises(ConfigError, match="offload_optimizer says optimizer and --offload says"):
        read_deepspeed(block, {"offload": "none"})


def test_the_textbook_sample_trains_as_the_same_run_by_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(TEXTBOOK)
    (tmp_path / "by_file").mkdir()
    (tmp_path / "by_options").mkdir()

    by_file = _train(tmp_path / "by_file", "--deepspeed", str(path))
    told = capsys.readouterr().err
    options = "--micro-batch 2 --microbatches 4 --clip 1.0 --dtype bfloat16 --zero 3 --overlap"
    by_options = _train(tmp_path / "by_options", *options.split(), "--reduce", "microbatch")

    assert told.count("offload_optimizer.pin_memory is ignored") == 1
    assert told.count("reduce_bucket_size has no effect at stage 3") == 1
    assert by_file == by_options
    ends = [_weights_of(tmp_path / name / "run", step=2) for name in ("by_file", "by_options")]
    assert ends[0].keys() == ends[1].keys() > {"model.embed_tokens.weight", "lm_head.weight"}
    for name, weight in ends[1].items():
        assert torch.equal(ends[0][name], weight), name
    assert by_file[0]["tokens"] == 2 * 4 * 2 * 16
    saved = RunConfig.load(tmp_path / "by_file" / "run" / "config.json")
    assert saved.dtype == "bfloat16"
    assert saved.parallel.offload == "parameters"
    assert saved.sizes.global_batch == 16


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"gradient_clipping": 10**400}, ["gradient_clipping must be a finite number"]),
        ({"gradient_clipping": math.nan}, ["gradient_clipping must be a finite number"]),
        ({"train_batch_size": math.inf}, ["train_batch_size must be a finite number"]),
        ({"train_batch_size": True}, ["train_batch_size must be a finite number, got true"]),
        ({"train_batch_size": -4}, ["train_batch_size must be a whole number from 1, got -4"]),
        ({"train_batch_size": [4]}, ["train_batch_size must be a finite number, got [4]"]),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 5000}},
            ["fp16.initial_scale_power must be at most 127, got 5000"],
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 10**400}},
            ["fp16.loss_scale must be a finite number"],
        ),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 10**400}}}, ["params.lr must be"]),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 10**400}}},
            ["warmup_max_lr must be a finite number"],
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2.5}}},
            ["warmup_num_steps must be a whole number"],
        ),
    ],
    ids=str,
)
def test_numbers_that_no_machine_holds_are_refused(block: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_deepspeed(block)
    for word in words:
        assert word in str(caught.value)
