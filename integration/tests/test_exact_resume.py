"""A resumed run computes, bit for bit, what it would have computed without the stop."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.checkpointing import CheckpointingWarning
from trainwright.checkpointing.state import StateStore
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration import Corpus, ModelShape, RunConfig, assemble, train
from trainwright.integration.parts import Parts, Progress
from trainwright.integration.recipe import StepRecord
from trainwright.integration.training_state import restore_state, save_state
from trainwright.precision import DynamicLossScaler
from trainwright.stability_guards import MemoryJournal

STREAM = np.frombuffer(b"what was learned is kept, whenever the run ends. " * 5, dtype=np.uint8)
CORPUS = Corpus(train=STREAM, held_out=STREAM, files=1, skipped=(), source="a test")
SHAPE = ModelShape(width=16, layers=4, heads=2, kv_heads=2, mlp_width=24)
ROOT = Path("/run/checkpoints")
STEPS = 4
LAYOUTS = [
    {"layout": "dp=1"},
    {"layout": "dp=2", "zero": 1},
    {"layout": "dp=2", "zero": 3},
    {"layout": "tp=2,pp=2", "schedule": "zb-h1"},
    {"layout": "dp=2,pp=2", "zero": 2, "reduce": "microbatch"},
    {"layout": "dp=2,tp=2", "zero": 3, "gather": "unit", "sequence_parallel": True},
    {"layout": "pp=2", "schedule": "zb-v", "recompute": "full"},
]


def _config(**changes: Any) -> RunConfig:
    # 16 sequences of 16 bytes: the second epoch begins within the third step.
    base = RunConfig.of(steps=STEPS, global_batch=8, microbatches=2, sequence_length=15, warmup=2)
    return base.evolve(**changes)


def _save(parts: Parts, progress: Progress, files: CrashingFiles) -> None:
    save_state(_store(parts, files), parts, progress)


def _store(parts: Parts, files: CrashingFiles) -> StateStore:
    return StateStore(ROOT, parts.mesh.world, coordinates=parts.mesh.coordinates, files=files)


def _held(parts: Parts) -> dict[str, torch.Tensor]:
    """Return all that decides how this rank goes on, by name."""
    state = {}
    for name, piece in parts.model.pieces.items():
        state[name] = piece.parameter.detach().clone()
        for moment, tensor in parts.optimizer.state[piece.parameter].items():
            state[f"{name} {moment}"] = tensor.clone()
    return {**state, **_scales(parts)}


def _go_on(parts: Parts, progress: Progress, steps: int) -> list[StepRecord]:
    records: list[StepRecord] = []
    if steps:
        settings = parts.config.evolve(steps=steps)
        train(attrs.evolve(parts, config=settings), progress, [records.append])
    # Where a run would end is a setting that differs here.
    return [attrs.evolve(record, seconds=0.0, end=0) for record in records]


def _assert_equal(found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert tensor.dtype == found[name].dtype
        assert torch.equal(found[name], tensor), name


@settings(max_examples=5)
@given(
    shared=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(["float32", "bfloat16", "float64", "float16", "fp8-delayed"]),
    tied=st.booleans(),
    stop=st.integers(0, STEPS),
    asynchronous=st.booleans(),
)
def test_a_run_stopped_after_any_step_in_any_layout_goes_on_bit_for_bit(
    shared: dict[str, Any], dtype: str, tied: bool, stop: int, asynchronous: bool
) -> None:
    config = _config(dtype=dtype, **shared)
    shape = attrs.evolve(SHAPE, tied=tied)
    files = CrashingFiles()

    def work(comm: Communicator) -> None:
        whole = assemble(config, comm, CORPUS, shape)
        right = _go_on(whole, whole.start(), STEPS)

        first = assemble(config, comm, CORPUS, shape)
        progress = first.start()
        made = _go_on(first, progress, stop)
        with _store(first, files) as store:
            save_state(store, first, progress, asynchronous=asynchronous)
            _go_on(first, progress, min(stop + 1, STEPS))  # none of this may be saved
        second = assemble(config, comm, CORPUS, shape)
        for piece in second.model.pieces.values():
            piece.parameter.detach().fill_(7.0)  # whatever a fresh process may hold
        restored = restore_state(_store(second, files), second)
        assert restored is not None
        made += _go_on(second, restored, STEPS)

        assert made == right
        _assert_equal(_held(second), _held(whole))
        assert second.scaler.state_dict()["scale"] == whole.scaler.state_dict()["scale"]

    LocalWorld(config.parallel.mesh.world_size).run(work)


@pytest.mark.parametrize(
    ("dtype", "before", "after"),
    [
        ("float16", {"layout": "dp=2", "zero": 1}, {"layout": "pp=2"}),
        ("fp8-delayed", {"layout": "pp=2", "schedule": "zb-v"}, {"layout": "dp=2", "zero": 3}),
    ],
)
def test_scales_go_on_where_they_were_in_another_layout(
    dtype: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    files = CrashingFiles()
    journals = [MemoryJournal(), MemoryJournal()]

    def begin(comm: Communicator) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        config = _config(dtype=dtype, **before)
        parts = assemble(config, comm, CORPUS, SHAPE, journals[comm.rank])
        progress = parts.start()
        parts.scaler.load_state_dict({**parts.scaler.state_dict(), **OVERFLOWING[dtype]})
        records = _go_on(parts, progress, STEPS)
        assert (0 < progress.skipped < STEPS) == (dtype == "float16")
        assert [record.lr > 0 for record in records].count(False) == progress.skipped
        assert [record.skipped for record in records].count(True) == progress.skipped
        _save(parts, progress, files)
        return parts.scaler.state_dict(), _scales(parts)

    def go_on(comm: Communicator) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        config = _config(dtype=dtype, **after)
        parts = assemble(config, comm, CORPUS, SHAPE, journals[comm.rank])
        restored = restore_state(_store(parts, files), parts)
        assert restored is not None
        assert all(state.num_steps == STEPS for state in parts.scales.states)
        return parts.scaler.state_dict(), _scales(parts)

    saved, found = LocalWorld(2).run(begin), LocalWorld(2).run(go_on)

    for state, _ in [*saved, *found]:
        assert state == saved[0][0]
    whole = {name: scale for _, scales in saved for name, scale in scales.items()}
    assert len(whole) == (2 * 3 * 7 * SHAPE.layers if dtype == "fp8-delayed" else 0)
    for _, scales in found:
        for name, scale in scales.items():
            assert torch.equal(scale, whole[name]), name


OVERFLOWING: dict[str, dict[str, Any]] = {
    "float16": {"scale": 2.0**22, "_growth_tracker": 7},
    "fp8-delayed": {},
}
"""What of a scaler's state makes the first steps overflow."""


def _scales(parts: Parts) -> dict[str, torch.Tensor]:
    return {
        f"{name} {leaf}": held.tensor
        for name, leaves in parts.scales.tree().items()
        for leaf, held in leaves.items()
    }


def test_learning_rates_after_a_stop_at_any_update_are_those_of_a_run_never_stopped() -> None:
    config = _config(steps=10, warmup=3, global_batch=2)
    shape = ModelShape(width=8, layers=1, heads=1, kv_heads=1, mlp_width=8)

    def work(comm: Communicator) -> None:
        whole = assemble(config, comm, CORPUS, shape)
        right = [record.lr for record in _go_on(whole, whole.start(), 10)]
        assert right[0] < right[1] < right[2] == right[3] > right[4] > right[9]
        first = assemble(config, comm, CORPUS, shape)
        progress = first.start()
        for stop in range(1, 11):
            files = CrashingFiles()
            made = [record.lr for record in _go_on(first, progress, stop)]
            _save(first, progress, files)
            second = assemble(config, comm, CORPUS, shape)
            restored = restore_state(_store(second, files), second)
            assert restored is not None
            after = [record.lr for record in _go_on(second, restored, 10)]
            assert right[stop - 1 :] == made + after

    LocalWorld(1).run(work)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_after_a_load_the_weights_of_the_modules_are_the_masters_rounded(zero: int) -> None:
    config = _config(
        layout="dp=2", zero=zero, dtype="bfloat16", gather="step" if zero == 3 else "auto"
    )
    files = CrashingFiles()

    def work(comm: Communicator) -> None:
        first = assemble(config, comm, CORPUS, SHAPE)
        progress = first.start()
        _go_on(first, progress, 3)
        _save(first, progress, files)
        second = assemble(config, comm, CORPUS, SHAPE)
        restored = restore_state(_store(second, files), second)

        assert restored is not None
        second.model.gather()
        weights = dict(second.model.stages[0].named_parameters())
        for name, piece in second.model.pieces.items():
            assert piece.parameter.dtype == torch.float32
            held = piece.spec.extract(weights[name].detach()).view_as(piece.parameter)
            assert torch.equal(held, piece.parameter.detach().to(held.dtype))
            assert held.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
        second.model.release()
        assert _go_on(second, restored, 4) == _go_on(first, progress, 4)
        _assert_equal(_held(second), _held(first))

    LocalWorld(2).run(work)


def _with_own(comm: Communicator, config: RunConfig, first_seed: int) -> Parts:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    scaler = DynamicLossScaler(init_scale=8.0)
    return attrs.evolve(
        assemble(config, comm, CORPUS, SHAPE),
        own={"schedule": schedule, "scaler": scaler},
        generators={"noise": torch.Generator().manual_seed(first_seed + comm.rank)},
    )


def _use_own(parts: Parts) -> tuple[list[float], dict[str, Any], list[float]]:
    schedule: Any = parts.own["schedule"]
    scaler: Any = parts.own["scaler"]
    schedule.optimizer.step()
    schedule.step()
    scaler.update(new_scale=2 * scaler.state_dict()["scale"])
    drawn = torch.rand(2, generator=parts.generators["noise"]).tolist()
    return schedule.get_last_lr(), scaler.state_dict(), drawn


@pytest.mark.parametrize("after", ["dp=2", "tp=2"])
def test_schedules_scalers_and_generators_of_ones_own_are_in_the_state(after: str) -> None:
    files = CrashingFiles()

    def save(comm: Communicator) -> Any:
        first = _with_own(comm, _config(layout="dp=2"), 1)
        for _ in range(comm.rank + 1):
            torch.rand(1, generator=first.generators["noise"])
        _use_own(first)
        _save(first, first.start(), files)
        return [_use_own(first) for _ in range(3)]

    def resume(comm: Communicator) -> Any:
        second = _with_own(comm, _config(layout=after), 100)
        assert restore_state(_store(second, files), second) is not None
        return [_use_own(second) for _ in range(3)]

    right = LocalWorld(2).run(save)
    expected = contextlib.nullcontext() if after == "dp=2" else pytest.warns(CheckpointingWarning)
    with expected:
        found = LocalWorld(2).run(resume)

    if after == "dp=2":
        assert found == right
    assert [[each[:2] for each in rank] for rank in found] == [
        [each[:2] for each in rank] for rank in right
    ]
    assert len({str(each[2]) for rank in found for each in rank}) == 6
