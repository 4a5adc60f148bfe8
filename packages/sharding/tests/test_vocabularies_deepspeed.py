"""Settings of DeepSpeed become a policy, a note with the reason, or an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.sharding import NotAvailableError, ShardingError
from trainwright.sharding.data import (
    ShardPolicy,
    policy_from_deepspeed,
)
from trainwright.sharding.data.units import by_class, plan_units
from trainwright.sharding.data.vocabulary_deepspeed import _WORDS as DEEPSPEED_WORDS


class Block(nn.Module):
    """A layer of a model that wrap policies choose."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        return outputs


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), Block(), Block(), nn.Linear(4, 2))


def unit_names(policy: ShardPolicy) -> list[str]:
    return [unit.name for unit in plan_units(model(), policy.units)]


@pytest.mark.parametrize(
    ("block", "fields"),
    [
        ({"stage": 1}, {"stage": 1}),
        ({"stage": "2"}, {"stage": 2, "reduce_each_backward": True}),
        ({"stage": 3}, {"stage": 3, "reduce_each_backward": True}),
        ({"reduce_bucket_size": 5e8}, {"bucket_bytes": 2 * 10**9}),
        ({"reduce_bucket_size": "5e8"}, {"bucket_bytes": 2 * 10**9}),
        ({"reduce_bucket_size": 1000}, {"bucket_bytes": 4000}),
        ({"stage": 1, "ignore_unused_parameters": False}, {"missing_gradients": "error"}),
        (
            {"stage": 2, "ignore_unused_parameters": False},
            {"stage": 2, "missing_gradients": "error", "reduce_each_backward": False},
        ),
        ({"ignore_unused_parameters": True}, {}),
        ({"stage3_prefetch_bucket_size": 0}, {"live_units": 1}),
        ({"prefetch_bucket_size": 5e7}, {"live_units": 2}),
        ({"stage": None, "reduce_bucket_size": None}, {}),
    ],
)
def test_keys_of_deepspeed_are_fields_of_the_policy(
    block: dict[str, Any], fields: dict[str, Any]
) -> None:
    stage = {"stage": int(block["stage"])} if block.get("stage") else {}

    assert policy_from_deepspeed(block).policy == ShardPolicy(**{**stage, **fields})


def test_a_block_without_stage_is_stage_zero() -> None:
    assert policy_from_deepspeed({}).policy == ShardPolicy()


def test_a_block_read_from_json_with_everything_at_its_default_is_accepted() -> None:
    block = json.loads(
        """{"stage": 2, "contiguous_gradients": true, "reduce_scatter": true,
        "reduce_bucket_size": 5e8, "allgather_partitions": true, "allgather_bucket_size": 5e8,
        "overlap_comm": null, "round_robin_gradients": false, "sub_group_size": 1e9,
        "zero_hpz_partition_size": 1, "zero_quantized_weights": false, "zenflow": null,
        "offload_optimizer": {"device": "none"}, "offload_param": null,
        "leaf_module": {"classes": [], "names": [], "name_suffixes": []},
        "stage3_max_live_parameters": 1e9, "stage3_param_persistence_threshold": 1e5,
        "legacy_stage1": false, "mics_shard_size": -1}"""
    )

    found = policy_from_deepspeed(block)

    assert (found.policy.stage, found.policy.bucket_bytes) == (2, 2 * 10**9)
    assert found.mesh_changes == {}
    noted = [note.split("=")[0] for note in found.notes]
    assert sorted(noted) == sorted(
        [
            "allgather_bucket_size",
            "allgather_partitions",
            "contiguous_gradients",
            "reduce_scatter",
            "round_robin_gradients",
            "sub_group_size",
            "stage3_max_live_parameters",
            "stage3_param_persistence_threshold",
            "reduce_each_backward",
        ]
    )


@pytest.mark.parametrize("key", list(DEEPSPEED_WORDS))
def test_every_key_of_deepspeed_changes_the_policy_or_the_mesh_or_is_noted_or_refused(
    key: str,
) -> None:
    values: dict[str, Any] = {
        "stage": 1,
        "leaf_module": {"names": ["x"]},
        "ignore_unused_parameters": False,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "nvme", "nvme_path": "/x"},
        "cpu_offload": True,
        "cpu_offload_param": True,
    }

    def outcome(value: Any) -> object:
        try:
            return policy_from_deepspeed({key: value})
        except NotAvailableError as error:
            return str(error)

    assert outcome(values.get(key, 8)) != policy_from_deepspeed({})


def test_modules_that_deepspeed_calls_leaves_are_units() -> None:
    by_class_name = policy_from_deepspeed({"stage": 3, "leaf_module": {"classes": ["Block"]}})
    by_path = policy_from_deepspeed({"leaf_module": {"classes": [f"{Block.__module__}.Block"]}})
    by_suffix = policy_from_deepspeed({"leaf_module": {"name_suffixes": ["2.inner"]}})
    by_name = policy_from_deepspeed({"leaf_module": {"names": ["1"]}})

    assert unit_names(by_class_name.policy) == unit_names(by_path.policy) == ["", "1", "2"]
    assert unit_names(by_suffix.policy) == ["", "2.inner"]
    assert unit_names(by_name.policy) == ["", "1"]


def test_stage_three_without_units_says_what_that_costs() -> None:
    alone = policy_from_deepspeed({"stage": 3})
    chosen = policy_from_deepspeed({"stage": 3}, units=by_class(Block))

    assert any("whole model is gathered at once" in note for note in alone.notes)
    assert not any("whole model" in note for note in chosen.notes)
    assert unit_names(chosen.policy) == ["", "1", "2"]


def test_mics_cuts_over_part_of_the_ranks() -> None:
    assert policy_from_deepspeed({"stage": 3, "mics_shard_size": 4}).mesh_changes == {"dp_shard": 4}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"stage": 4}, "stage must be 0, 1, 2 or 3"),
        ({"stage": True}, "write the stage as a number"),
        ({"stage": "auto"}, "stage='auto' must be filled in"),
        ({"reduce_bucket_size": 1509949.4}, "must be a whole number, got 1509949.4"),
        ({"reduce_bucket_size": "many"}, "must be a number, got 'many'"),
        ({"reduce_bucket_size": [5]}, "must be a number"),
        ({"reduce_bucket_size": 0}, "bucket_bytes must be at least 1"),
        ({"reduce_bucket_sise": 5}, "did you mean 'reduce_bucket_size'"),
        ({"grad_hooks": True}, "no setting 'grad_hooks'"),
        (
            {"stage3_prefetch_bucket_size": 1, "prefetch_bucket_size": 1},
            "stage3_prefetch_bucket_size twice",
        ),
        ({"ignore_unused_parameters": 1}, "must be true or false"),
        ({"leaf_module": {"class": []}}, "a block of classes, names, name_suffixes"),
        ({"leaf_module": ["Block"]}, "a block of classes"),
    ],
)
def test_values_of_deepspeed_that_make_no_sense_are_refused(
    block: dict[str, Any], message: str
) -> None:
    with pytest.raises(ShardingError, match=message):
        policy_from_deepspeed(block)


def test_a_block_that_is_no_block_is_refused() -> None:
    with pytest.raises(ShardingError, match="must be a block such as"):
        policy_from_deepspeed(True)  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="units both choose"):
        policy_from_deepspeed({"leaf_module": {"names": ["1"]}}, units=by_class(Block))


@pytest.mark.parametrize(
    "block",
    [
        {"zero_quantized_weights": True},
        {"zero_quantized_nontrainable_weights": True},
        {"zero_quantized_gradients": True},
        {"zeropp_loco_param": {"err_beta": 0.8}},
        {"zero_hpz_partition_size": 8},
        {"zenflow": {"topk_ratio": 0.1}},
        {"legacy_stage1": True},
        {"mics_hierarchical_params_gather": True},
    ],
    ids=str,
)
def test_what_deepspeed_has_and_we_have_not_is_refused_by_name(block: dict[str, Any]) -> None:
    (key,) = block

    with pytest.raises(NotAvailableError, match=key):
        policy_from_deepspeed(block)


@pytest.mark.parametrize(
    ("block", "asked"),
    [
        ({"stage": 1}, ("device", False, None)),
        ({"stage": 1, "offload_optimizer": {"device": "none"}}, ("device", False, None)),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, ("host", False, None)),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, ("device", False, None)),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, ("host", True, None)),
        ({"stage": 3, "cpu_offload": True, "cpu_offload_param": True}, ("host", True, None)),
        (
            {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}},
            ("file", False, "/x"),
        ),
        (
            {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}},
            ("file", True, "/x"),
        ),
    ],
    ids=str,
)
def test_offload_blocks_of_deepspeed_say_where_states_and_weights_are(
    block: dict[str, Any], asked: tuple[str, bool, str | None]
) -> None:
    found = policy_from_deepspeed(block).offload

    assert (found.states, found.weights, found.folder) == asked


def test_settings_of_offload_without_effect_are_noted_with_the_reason() -> None:
    block = {"device": "cpu", "pin_memory": True, "buffer_count": 4, "fast_init": False}

    notes = policy_from_deepspeed({"stage": 1, "offload_optimizer": block}).notes

    assert [note.split(" is ")[0] for note in notes] == [
        "offload_optimizer.pin_memory",
        "offload_optimizer.buffer_count",
        "offload_optimizer.fast_init",
    ]


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_folder_that_no_device_writes_to_is_noted(device: str) -> None:
    block = {"device": device, "nvme_path": "/x", "ratio": 1 if device == "cpu" else 0.3}

    notes = policy_from_deepspeed({"stage": 1, "offload_optimizer": block}).notes

    said = f"has no effect: the device is {device}"
    assert f"offload_optimizer.nvme_path {said}" in notes
    assert (f"offload_optimizer.ratio {said}" in notes) == (device == "none")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"offload_optimizer": {"device": "disk"}}, "must be none, cpu or nvme, got 'disk'"),
        ({"offload_optimizer": {"device": "nvme"}}, "needs nvme_path, a folder, got None"),
        ({"offload_optimizer": {"device": "cpu", "pin_memry": 1}}, "did you mean 'pin_memory'"),
        ({"offload_optimizer": "cpu"}, "must be a block"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "all states are offloaded"),
        ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, "once the norm is known"),
        ({"cpu_offload": 1.5}, "must be true or false"),
        ({"cpu_offload": 1}, "must be true or false, got 1"),
        ({"offload_optimizer": {"device": False}}, "must be none, cpu or nvme, got False"),
        ({"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, "an old name"),
        (
            {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
                "offload_param": {"device": "nvme", "nvme_path": "/y"},
            },
            "two folders",
        ),
    ],
    ids=str,
)
def test_offload_blocks_that_make_no_sense_are_refused(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        policy_from_deepspeed(block)
