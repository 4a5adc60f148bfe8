"""What DeepSpeed's keys ask for happens in a run."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from tests.serial import GROUPED, text
from trainwright.checkpointing.activations.offload import HostMemory
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.deepspeed import read_deepspeed
from trainwright.integration.model import Block
from trainwright.integration.parts import Parts, assemble
from trainwright.integration.recipe import StepRecord, train
from trainwright.sharding.data import DataParallel
from trainwright.sharding.data.testing import RecordedCall, RecordingCommunicator
from trainwright.sharding.offload import FileStore

SHAPE = attrs.evolve(GROUPED, layers=2)
FLAGS = {"steps": 3, "global_batch": 4, "sequence_length": 8, "warmup": 1, "sample_bytes": 0}


def run(
    block: Mapping[str, Any],
    look: Callable[[Parts, list[RecordedCall], list[StepRecord]], Any],
    **flags: Any,
) -> Any:
    """Train by a configuration; return what the first rank sees then."""
    usual = {n: v for n, v in FLAGS.items() if not (n == "warmup" and "scheduler" in block)}
    config = read_deepspeed(block, {"layout": "dp=2", **usual, **flags}).config

    def work(world: Communicator) -> Any:
        calls: list[RecordedCall] = []
        records: list[StepRecord] = []
        parts = assemble(config, RecordingCommunicator(world, calls), text(), SHAPE)
        train(parts, parts.start(), [records.append])
        return look(parts, calls, records)

    return LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(work)[0]


def reductions(_: Parts, calls: list[RecordedCall], records: list[StepRecord]) -> int:
    return sum(c.operation == "reduce_scatter" and c.dtype.is_floating_point for c in calls)


def weights(parts: Parts, *_: object) -> dict[str, torch.Tensor]:
    return {name: piece.parameter.detach().clone() for name, piece in parts.model.pieces.items()}


def rates(_: Parts, calls: list[RecordedCall], records: list[StepRecord]) -> list[float]:
    return [record.lr for record in records]


@pytest.mark.parametrize("key", ["reduce_bucket_size", "allgather_bucket_size"])
def test_smaller_buckets_are_reduced_one_by_one(key: str) -> None:
    large = run({"zero_optimization": {"stage": 1, key: 5e8}}, reductions)
    small = run({"zero_optimization": {"stage": 1, key: 1024}}, reductions)
    assert small > 2 * large


def test_accumulated_gradients_are_reduced_as_the_stage_says() -> None:
    counts = [
        run({"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2}, reductions)
        for stage in (1, 2)
    ]
    assert counts[1] == 2 * counts[0]


def test_without_overlap_nothing_is_announced_and_the_result_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announced = []
    announce = DataParallel.last_backward

    def counted(self: DataParallel) -> None:
        announced.append(self)
        announce(self)

    monkeypatch.setattr(DataParallel, "last_backward", counted)

    with_overlap = run({"zero_optimization": {"stage": 1, "overlap_comm": True}}, weights)
    times = len(announced)
    without = run({"zero_optimization": {"stage": 1, "overlap_comm": False}}, weights)

    assert times == 2 * 3
    assert len(announced) == times
    assert all(torch.equal(with_overlap[name], without[name]) for name in without)


@pytest.mark.parametrize("key", ["stage3_prefetch_bucket_size", "stage3_max_live_parameters"])
def test_layers_are_fetched_ahead_as_far_as_the_file_says(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = threading.local()  # ranks are threads
    forward, init = Block.forward, RecordingCommunicator.__init__

    def began(self: RecordingCommunicator, world: Any, calls: list[RecordedCall]) -> None:
        init(self, world, calls)
        if not hasattr(own, "calls"):
            own.calls, own.gathers = calls, []

    def counted(self: Block, *arguments: Any, **named: Any) -> Any:
        own.gathers.append(sum(call.operation == "all_gather" for call in own.calls))
        return forward(self, *arguments, **named)

    monkeypatch.setattr(RecordingCommunicator, "__init__", began)
    monkeypatch.setattr(Block, "forward", counted)

    def seen(parts: Parts, *_: object) -> tuple[int, dict[str, torch.Tensor]]:
        first, second = own.gathers[-2:]  # the order is known by then
        return second - first, weights(parts)

    (alone, one), (ahead, two) = (
        run({"zero_optimization": {"stage": 3, key: elements}}, seen) for elements in (0, 5e8)
    )

    assert alone > 0  # the second layer is fetched behind the first one
    assert ahead == 0  # or was already
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_gradients_travel_in_the_dtype_of_communication() -> None:
    def dtypes(_: Parts, calls: list[RecordedCall], records: list[StepRecord]) -> set[torch.dtype]:
        return {c.dtype for c in calls if c.operation == "reduce_scatter"}

    block = {"zero_optimization": {"stage": 1}, "communication_data_type": "bf16"}
    assert torch.bfloat16 in run(block, dtypes)
    assert torch.bfloat16 not in run({"zero_optimization": {"stage": 1}}, dtypes)


def test_the_loss_scale_follows_the_numbers_of_the_file() -> None:
    block = {
        "fp16": {
            "enabled": True,
            "initial_scale_power": 4,
            "loss_scale_window": 2,
            "hysteresis": 3,
            "min_loss_scale": 2,
            "consecutive_hysteresis": True,
        }
    }

    def state(parts: Parts, *_: object) -> dict[str, Any]:
        return dict(parts.scaler.state_dict())

    dynamic = run(block, state)
    static = run({"fp16": {"enabled": True, "loss_scale": 8}}, state)

    assert dynamic["scale"] == 2.0**5  # three clean steps, the second of which doubles it
    assert (dynamic["growth_interval"], dynamic["hysteresis"], dynamic["min_scale"]) == (2, 3, 2.0)
    assert dynamic["hysteresis_refills"] is True
    assert static["scale"] == 8.0


def test_clipping_and_none_are_told_apart() -> None:
    def clip(parts: Parts, *_: object) -> float:
        return parts.clip

    clipped = run({"gradient_clipping": 1e-3}, weights, optimizer="sgd", lr=1.0)
    free = run({"gradient_clipping": 0}, weights, optimizer="sgd", lr=1.0)

    assert run({"gradient_clipping": 0}, clip) == math.inf
    assert any(not torch.equal(clipped[name], free[name]) for name in free)


def test_the_optimizer_is_that_of_the_file() -> None:
    params = {"lr": 1e-4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3}

    def groups(parts: Parts, *_: object) -> Any:
        members = parts.optimizer.members
        kinds = {type(member.optimizer).__name__ for member in members}
        return kinds, [
            {n: group.get(n) for n in ("betas", "eps", "weight_decay")}
            for group in parts.optimizer.param_groups
            if group["params"]
        ]

    adamw, told = run({"optimizer": {"type": "Adam", "params": params}}, groups)
    adam, _ = run(
        {"optimizer": {"type": "Adam", "params": {**params, "adam_w_mode": False}}}, groups
    )

    assert (adamw, adam) == ({"AdamW"}, {"Adam"})
    assert {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3} in told


@pytest.mark.parametrize(
    ("kind", "classes", "said"),
    [
        ("SGD", {"SGD"}, {"momentum": 0.5, "nesterov": True, "weight_decay": 0.3}),
        ("Lion", {"Lion"}, {"betas": (0.8, 0.9), "weight_decay": 0.3}),
        ("Muon", {"AdamW", "WholeMatrices"}, {"momentum": 0.5, "weight_decay": 0.3}),
    ],
)
def test_other_optimizers_are_those_of_the_file(
    kind: str, classes: set[str], said: dict[str, Any]
) -> None:
    def groups(parts: Parts, *_: object) -> Any:
        kinds = {type(member.optimizer).__name__ for member in parts.optimizer.members}
        found = [{n: group.get(n) for n in said} for group in parts.optimizer.param_groups]
        return kinds, found, weights(parts)

    params = {n: list(v) if isinstance(v, tuple) else v for n, v in said.items()}
    kinds, found, moved = run({"optimizer": {"type": kind, "params": params}}, groups)
    *_, farther = run({"optimizer": {"type": kind, "params": {**params, "lr": 0.1}}}, groups)

    assert kinds == classes
    assert said in found
    assert any(not torch.equal(moved[name], farther[name]) for name in moved)


def test_updates_have_the_rates_of_the_files_schedule() -> None:
    block = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 2, "warmup_type": "linear", "warmup_min_lr": 0.001},
        },
    }
    assert run(block, rates) == pytest.approx([0.001, 0.001, 0.0055])


@pytest.mark.parametrize(
    "block",
    [
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        {"activation_checkpointing": {"partition_activations": True}},
        {"activation_checkpointing": {"number_checkpoints": SHAPE.layers}},
        {"pipeline": {"activation_checkpoint_interval": 1}},
    ],
    ids=str,
)
def test_layers_are_computed_again_as_the_file_says(
    block: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    forward = Block.forward

    def counted(self: Block, *arguments: Any, **named: Any) -> Any:
        counts.append(self)
        return forward(self, *arguments, **named)

    monkeypatch.setattr(Block, "forward", counted)
    usual = run({}, weights)
    once = len(counts)
    again = run(block, weights)

    assert len(counts) - once == 2 * once
    assert all(torch.equal(again[name], usual[name]) for name in usual)


def test_what_backward_needs_waits_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    store = HostMemory.store

    def counted(self: HostMemory, elements: torch.Tensor) -> Any:
        kept.append(elements.numel())
        return store(self, elements)

    monkeypatch.setattr(HostMemory, "store", counted)

    run({"activation_checkpointing": {"number_checkpoints": 2}}, weights)
    assert kept == []
    run({"activation_checkpointing": {"cpu_checkpointing": True}}, weights)
    assert len(kept) >= 2 * 3 * SHAPE.layers


def test_tensor_parallel_ranks_have_a_part_of_the_activations() -> None:
    def operations(_: Parts, calls: list[RecordedCall], records: list[StepRecord]) -> Any:
        return {call.operation for call in calls}, [record.loss for record in records]

    block = {"activation_checkpointing": {"partition_activations": True}}
    whole, usual = run({}, operations, layout="tp=2")
    cut, losses = run(block, operations, layout="tp=2")

    assert "reduce_scatter" in cut - whole
    assert losses == pytest.approx(usual, rel=1e-5)


def test_dtypes_of_the_file_are_those_of_the_weights() -> None:
    def dtypes(parts: Parts, *_: object) -> set[torch.dtype]:
        return {p.dtype for stage in parts.model.stages.values() for p in stage.parameters()}

    assert torch.bfloat16 in run({"bf16": {"enabled": True}}, dtypes)
    assert torch.float16 in run({"fp16": {"enabled": True}}, dtypes)
    assert torch.bfloat16 not in run({"bf16": {"enabled": "auto"}}, dtypes)


TEXTBOOK = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
    },
}
"""What a first page shows."""


def test_the_textbook_sample_keeps_states_and_weights_in_host_memory() -> None:
    def held(parts: Parts, *_: object) -> tuple[int, int, int, dict[str, torch.Tensor]]:
        offload = parts.model.offload
        if offload is None:
            return 0, 0, 0, weights(parts)
        sizes = (piece.parameter.numel() for piece in parts.model.pieces.values())
        assert offload.weights is offload.states
        on_host, on_device = offload.states.ledger.held_bytes, offload.device.held_bytes
        return sum(sizes), on_host, on_device, weights(parts)

    zero = TEXTBOOK["zero_optimization"]
    assert isinstance(zero, dict)
    kept = {key: value for key, value in zero.items() if not key.startswith("offload")}
    elements, on_host, on_device, found = run(TEXTBOOK, held)
    *_, usual = run({**TEXTBOOK, "zero_optimization": kept}, held)

    # Masters, two moments and gradients of four bytes, weights of two, and padding.
    assert 18 * elements <= on_host < 18.5 * elements
    assert on_device == 0  # between steps
    assert all(torch.equal(found[name], usual[name]) for name in usual)


def test_states_go_to_a_file_in_the_folder_that_is_named(tmp_path: Path) -> None:
    block = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 4}

    def file_bytes(parts: Parts, *_: object) -> int:
        assert parts.model.offload is not None
        store = parts.model.offload.states
        assert isinstance(store, FileStore)
        assert store.folder == tmp_path
        return store.file_bytes

    assert run({"zero_optimization": {"stage": 1, "offload_optimizer": block}}, file_bytes) > 0
    assert list(tmp_path.iterdir()) == []
