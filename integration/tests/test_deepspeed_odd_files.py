"""Odd files of DeepSpeed's, which DeepSpeed itself takes in silence, say what is meant or wrong."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest

from trainwright.integration.deepspeed import read_deepspeed
from trainwright.integration.deepspeed.activations import _PIPELINE as PIPELINE_WORDS
from trainwright.integration.deepspeed.activations import _WORDS as ACTIVATION_WORDS
from trainwright.integration.deepspeed.formats import _BF16 as BF16_WORDS
from trainwright.integration.deepspeed.formats import _FP16 as FP16_WORDS
from trainwright.integration.deepspeed.reading import _WORDS as READING_WORDS
from trainwright.integration.deepspeed.training import _PARAMS as PARAMS_WORDS
from trainwright.integration.deepspeed.zero import _WORDS as ZERO_WORDS
from trainwright.integration.errors import ConfigError
from trainwright.integration.foreign_rates import foreign_rate
from trainwright.integration.rates import learning_rate


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_a_greatest_rate_of_zero_is_not_the_optimizers(kind: str) -> None:
    params = {"warmup_max_lr": 0, "warmup_num_steps": 2, "warmup_type": "linear"}
    if kind == "WarmupDecayLR":
        params["total_num_steps"] = 9
    schedule = foreign_rate(json.dumps({"type": kind, "params": params}))

    assert [schedule.at(update, lr=1.0, steps=9) for update in range(6)] == [0.0] * 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"type": "WarmupLR", "params": [1]}', "params must be an object, got [1]"),
        ('{"type": "WarmupLR", "params": null}', "params must be an object, got None"),
        ('{"type": "WarmupLR", "params": "x"}', "params must be an object, got 'x'"),
        (
            '{"type": "LRRangeTest", "params": {"lr_range_test_staircase": "yes"}}',
            "lr_range_test_staircase must be true or false, got 'yes'",
        ),
        (
            '{"type": "LRRangeTest", "params": {"lr_range_test_staircase": 1}}',
            "lr_range_test_staircase must be true or false, got 1",
        ),
    ],
)
def test_parameters_of_a_schedule_of_another_kind_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        foreign_rate(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"wandb": {"enable": True}}, "wandb is not available"),
        ({"csv_monitor": {"enabled": None}}, "say csv_monitor.enabled=false"),
        ({"torch_autocast": {"dtype": "bfloat16"}}, "say torch_autocast.enabled=false"),
        ({"compile": {"deepcompil": True}}, "say compile.deepcompile=false"),
        ({"communication_data_type": []}, "communication_data_type must be one of fp32"),
        ({"communication_data_type": {}}, "communication_data_type must be one of fp32"),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "twice, once as bfloat16"),
        ({"sub_group_size": 1}, "unknown key sub_group_size"),
        ({"optimizer": {"type": "SGD", "fused": True}}, "unknown key optimizer.fused"),
        ({"zero_optimization.sub_group_size": 1}, "unknown key zero_optimization.sub_group_size"),
        ({"optimizer": {"type": "SGD", "params.fused": 1}}, "unknown key optimizer.params.fused"),
    ],
    ids=str,
)
def test_a_switch_that_is_mistyped_or_misplaced_is_refused(
    block: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_deepspeed(block)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["wandb", "comms_logger", "flops_profiler", "autotuning"])
def test_a_block_that_is_switched_off_is_told_to_have_no_effect(key: str) -> None:
    reading = read_deepspeed({key: {"enabled": False, "debug": True}})

    assert reading.leaves == {}
    assert reading.notes == (f"{key} is not enabled: its other keys have no effect",)
    assert read_deepspeed({key: {}}).notes == ()


@pytest.mark.parametrize("block", [{}, {"stage": None}, {"stage": "auto"}], ids=str)
def test_a_block_without_a_stage_leaves_it_to_the_option(block: dict[str, Any]) -> None:
    given = {"zero": 2, "layout": "dp=2"}
    config = read_deepspeed({"zero_optimization": {**block, "reduce_bucket_size": 8}}, given).config

    assert (config.parallel.zero, config.parallel.reduce) == (2, "microbatch")
    assert config.parallel.bucket_bytes == 32


def test_auto_leaves_the_dtype_of_communication_to_the_option() -> None:
    block = {"communication_data_type": "auto"}

    assert read_deepspeed(block).leaves == {}
    assert read_deepspeed(block, {"reduce_dtype": "bfloat16"}).leaves["reduce_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("SGD", {"adam_w_mode": True}, "adam_w_mode is for Adam and AdamW, not for sgd"),
        ("Lion", {"adam_w_mode": False}, "adam_w_mode is for Adam and AdamW, not for lion"),
        ("AdamW", {"adam_w_mode": "no"}, "adam_w_mode must be true or false, got 'no'"),
        ("Adam", {"adam_w_mode": 0}, "adam_w_mode must be true or false, got 0"),
        ("Adam", [], "optimizer.params must be a block, got []"),
        ("Adam", False, "optimizer.params must be a block, got false"),
        ("Lion", {"eps": 1e-8}, "--eps is not used by --optimizer lion"),
        ("AdamW", {"lr": 0}, "--lr must be positive"),
        ("AdamW", {"betas": [0.9, None]}, "betas must be a finite number, got None"),
    ],
    ids=str,
)
def test_parameters_that_the_optimizer_does_not_have_are_refused(
    kind: str, params: object, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_deepspeed({"optimizer": {"type": kind, "params": params}})
    assert message in str(caught.value)


def test_adamw_has_no_other_mode_and_says_so() -> None:
    reading = read_deepspeed({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}})

    assert reading.leaves["optimizer"] == "adamw"
    assert "adam_w_mode has no effect" in " ".join(reading.notes)


def test_a_rise_that_is_left_to_options_is_a_part_of_the_files_updates() -> None:
    params = {"total_num_steps": 1e2, "warmup_num_steps": "auto", "warmup_type": "linear"}
    block = {"scheduler": {"type": "WarmupDecayLR", "params": {**params, "warmup_max_lr": "auto"}}}

    rise_of = {
        rise: read_deepspeed(block, {"lr": 0.5, "warmup_fraction": part}).config
        for rise, part in ((25, None), (40, 0.4))
    }

    for rise, config in rise_of.items():
        rates = learning_rate(config.rate, config.optimizer.lr, config.steps)
        assert config.steps == 100
        assert rates(rise + 1) == 0.5 == max(rates(update) for update in range(100))
        assert rates(rise) < 0.5


def test_an_option_is_the_greatest_rate_where_the_file_is_silent() -> None:
    params = {"total_num_steps": 9, "warmup_num_steps": 2, "warmup_type": "linear"}
    block = {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}

    config = read_deepspeed(block, {"lr": 3e-4}).config
    silent = read_deepspeed({**adam, **block})

    assert learning_rate(config.rate, config.optimizer.lr, config.steps)(3) == 3e-4
    rates = learning_rate(silent.config.rate, silent.config.optimizer.lr, silent.config.steps)
    assert rates(3) == 1e-3
    assert "rates rise to 0.001, whatever lr the optimizer has" in " ".join(silent.notes)


def test_an_option_that_a_schedule_does_not_read_is_told() -> None:
    params = {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_momentum": False}
    reading = read_deepspeed({"scheduler": {"type": "OneCycle", "params": params}}, {"lr": 3e-4})

    assert reading.notes == ("--lr has no effect with OneCycle, which has rates of its own",)


def test_a_device_that_is_left_open_is_that_of_the_option() -> None:
    block = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "auto"}}}
    mistyped = {"device": "auto", "pin_memry": True}

    reading = read_deepspeed(block, {"offload": "optimizer"})

    assert reading.config.parallel.offload == "optimizer"
    assert "offload_optimizer has no effect: --offload says the device" in reading.notes[0]
    assert read_deepspeed(block).config.parallel.offload == "none"
    with pytest.raises(ConfigError, match=r"pin_memry.*did you mean 'pin_memory'"):
        read_deepspeed({"zero_optimization": {"stage": 1, "offload_optimizer": mistyped}})


@pytest.mark.parametrize(
    ("total", "micro", "count", "sizes"),
    [
        (64, 4, None, (64, 4, 4)),
        (64, None, None, (64, 16, 1)),
        (None, 4, 2, (32, 4, 2)),
        ("auto", 4, 2, (32, 4, 2)),
        (64, None, 8, (64, 2, 8)),
        (30, 4, None, "global_batch=30 must be a multiple of micro_batch=4 * dp=4 = 16"),
        (2, 4, None, "global_batch=2 must be a multiple of micro_batch=4 * dp=4 = 16"),
        (64, 4, 3, "global_batch=64 must be micro_batch=4 * microbatches=3 * dp=4 = 48"),
    ],
)
def test_sizes_of_batches_multiply_out_over_data_ranks_alone(
    total: object, micro: int | None, count: int | None, sizes: tuple[int, ...] | str
) -> None:
    block = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": count,
    }
    config = read_deepspeed(block, {"layout": "dp=4,tp=2"}).config

    if isinstance(sizes, str):
        with pytest.raises(ConfigError) as caught:
            _ = config.sizes
        assert sizes in str(caught.value)
    else:
        found = config.sizes
        assert (found.global_batch, found.micro_batch, found.microbatches) == sizes


def test_accumulation_that_an_option_says_makes_as_many_updates_as_the_schedule_has() -> None:
    params = {"total_num_steps": "auto", "warmup_num_steps": 2, "cos_min_ratio": 0.1}
    block = {
        "train_micro_batch_size_per_gpu": 1,
        "scheduler": {"type": "WarmupCosineLR", "params": params},
    }
    # 20 microbatches, two of which make an update.
    config = read_deepspeed(block, {"microbatches": 2, "steps": 10, "lr": 1.0}).config

    rates = learning_rate(config.rate, config.optimizer.lr, config.steps)
    fall = [rates(update) for update in range(2, config.steps + 1)]

    assert config.sizes.microbatches == 2
    assert fall[-1] == pytest.approx(0.1)  # which DeepSpeed's steps reach behind the last update
    assert all(one > other for one, other in itertools.pairwise(fall[1:]))


@pytest.mark.parametrize(
    ("block", "flags", "message"),
    [
        ({"pipeline": {"stages": 2}}, {}, "pipeline.stages says 2 and --layout has pp=1"),
        ({"sequence_parallel_size": 2}, {"layout": "cp=4"}, "says 2 and --layout has cp=4"),
        ({"pipeline": {"partition": "uniform"}}, {}, "must be 'best', got 'uniform'"),
        ({"managed_gradient_accumulation": False}, {}, "must be true, got false"),
        ({"gradient_allreduce_op": "sum"}, {}, "must be 'mean', got 'sum'"),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, {}, "hysteresis must be a whole number"),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, {"loss_scale": 8.0}, "--loss-scale says 8"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, {}, "must be false"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, {}, "must be true, got false"),
        ({"zero_optimization": {"reduce_scatter": False}}, {}, "must be true, got false"),
        ({"zero_optimization": {"legacy_stage1": True}}, {}, "must be false, got true"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, {}, "must be false, got true"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, {}, "must be 1, got 8"),
        ({"zero_optimization": {"zenflow": {}}}, {}, "every update uses every gradient"),
        ({"zero_optimization": {"overlap_comm": 1}}, {}, "must be true or false, got 1"),
        ({"zero_optimization": {"stage": "2"}}, {}, "must be a finite number, got '2'"),
        ({"zero_optimization": {"grad_hooks": True}}, {}, "unknown key"),
        ({"checkpoint": {"use_node_local_storage": True}}, {}, "must be false, got true"),
        ({"checkpoint": {"writer": {}}}, {}, "--async-save"),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, "say tp in --layout"),
        ({"tensorboard": {"enabld": True}}, {}, "did you mean tensorboard.enabled"),
    ],
    ids=str,
)
def test_what_the_run_does_otherwise_is_refused(
    block: dict[str, Any], flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_deepspeed(block, flags)
    assert message in str(caught.value)


def test_what_the_run_does_anyway_is_accepted() -> None:
    block = {
        "pipeline": {"stages": 2, "partition": "best"},
        "sequence_parallel_size": 2,
        "managed_gradient_accumulation": True,
        "gradient_allreduce_op": "mean",
        "zero_optimization": {"reduce_scatter": True, "allgather_partitions": True}
        | {"zero_hpz_partition_size": 1, "contiguous_gradients": True},
    }
    flags = {"layout": "cp=2,pp=2"}

    assert read_deepspeed(block, flags).leaves == {**flags, "zero": 0}


def test_dropping_offload_contradicts_the_option_that_asks_for_it() -> None:
    block = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}

    with pytest.raises(ConfigError, match="--drop-offload leaves all on the device and --offload"):
        read_deepspeed(block, {"offload": "optimizer"}, drop_offload=True)
    kept = read_deepspeed(block, {"offload": "none"}, drop_offload=True)
    assert kept.config.parallel.offload == "none"


SCHEDULE = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps")
ODD = [None, "auto", "x", "", [], {}, {"x": 1}, [1, 2], -1, 0, 1.5, 1e300, 10**400, math.nan, True]
SWITCHED: dict[str, dict[str, Any]] = {
    "fp16": {"enabled": True},
    "bf16": {"enabled": True},
    "optimizer.params": {},
    "scheduler.params": {"total_num_steps": 9},
    "zero_optimization": {"stage": 3},
    "activation_checkpointing": {},
    "pipeline": {},
    "tensorboard": {},
    "checkpoint": {},
}


def _nested(path: str, value: object) -> dict[str, Any]:
    """Return a file with a value in a place."""
    *outer, key = path.split(".")
    block = {**SWITCHED.get(".".join(outer), {}), key: value}
    for name in reversed(outer):
        types = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupDecayLR"}}
        block = {name: {**types.get(name, {}), **block}} if name != "params" else {name: block}
    return block


@pytest.mark.parametrize(
    "path",
    [
        *READING_WORDS,
        *(f"fp16.{key}" for key in FP16_WORDS),
        *(f"bf16.{key}" for key in BF16_WORDS),
        *(f"zero_optimization.{key}" for key in ZERO_WORDS),
        *(f"zero_optimization.offload_optimizer.{key}" for key in ("device", "nvme_path", "ratio")),
        *(f"optimizer.params.{key}" for key in PARAMS_WORDS),
        *(f"scheduler.params.{key}" for key in SCHEDULE),
        *(f"activation_checkpointing.{key}" for key in ACTIVATION_WORDS),
        *(f"pipeline.{key}" for key in PIPELINE_WORDS),
        "tensorboard.enabled",
        "optimizer.type",
        "scheduler.type",
        "checkpoint.writer",
    ],
)
def test_a_value_of_any_kind_is_read_or_refused_by_name(path: str) -> None:
    name = path.rpartition(".")[2].removeprefix("stage3_")
    for value in ODD:
        for flags in ({}, {"layout": "dp=2", "lr": 0.5, "steps": 9, "zero": 3}):
            try:
                read_deepspeed(_nested(path, value), flags)
            except ConfigError as error:
                words = str(error).replace("-", "_")
                assert name in words


def test_a_file_is_told_in_its_own_words_what_is_out_of_range() -> None:
    block = {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.5]}}}

    with pytest.raises(ConfigError) as caught:
        read_deepspeed(block)

    assert "optimizer.params.betas: --beta2 must be from 0 to below 1, got 1.5" in str(caught.value)


@pytest.mark.parametrize(("decay", "told"), [(0.1, True), (0, False), ("auto", False)])
def test_a_decay_that_norms_do_not_have_here_is_told(decay: object, told: bool) -> None:
    params = {"weight_decay": decay}
    notes = read_deepspeed({"optimizer": {"type": "AdamW", "params": params}}).notes

    assert any("weight_decay is that of matrices alone" in note for note in notes) == told
