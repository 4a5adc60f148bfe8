"""Runs whose states are offloaded: the law, the same bits, and resuming in another way."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from tests.layouts import (
    RankSteps,
    join_steps,
    load_snapshot,
    observe_gradients,
    step_from,
    steps_in_layout,
)
from tests.serial import GROUPED, settings, text
from tests.serial_runs import serial_steps
from tests.test_law import assert_same_step, shape_of
from trainwright.checkpointing.state import StateStore
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.live_state import LiveState
from trainwright.integration.optimizers import held
from trainwright.integration.parts import Parts, assemble
from trainwright.integration.recipe import StepRecord, train
from trainwright.integration.recovering import describe_snapshots
from trainwright.integration.training_state import restore_state, save_state
from trainwright.sharding.offload import FileStore, OffloadError
from trainwright.stability_guards import Verdict

SHAPE = attrs.evolve(GROUPED, layers=2)
SHORT = {"steps": 4, "global_batch": 4, "sequence_length": 8, "warmup": 1, "sample_bytes": 0}
STEP = 20

Kept = dict[str, torch.Tensor]


def modes(config: Mapping[str, object], folder: Path) -> list[str]:
    whole = ["optimizer", f"nvme:{folder}"]
    return [*whole, "parameters"] if config["zero"] == 3 else whole


def run(
    leaves: Mapping[str, Any],
    *,
    save: CrashingFiles | None = None,
    load: CrashingFiles | None = None,
) -> list[tuple[Kept, list[tuple[float, float, Verdict]]]]:
    """Train; return what each rank keeps, and its steps."""
    config = RunConfig.of(**{**SHORT, **leaves})
    layers = SHAPE.layers * (2 if config.parallel.schedule == "zb-v" else 1)
    shape = attrs.evolve(SHAPE, tied=config.model.shape.tied, layers=layers)

    def work(world: Communicator) -> tuple[Kept, list[tuple[float, float, Verdict]]]:
        parts = assemble(config, world, text(), shape)
        progress = parts.start()
        if load is not None:
            found = restore_state(store_of(parts, load), parts)
            assert found is not None
            progress = found
        records: list[StepRecord] = []
        train(parts, progress, [records.append])
        if save is not None:
            save_state(store_of(parts, save), parts, progress)
        return kept(parts), [(r.loss, r.grad_norm, r.verdict) for r in records]

    return LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(work)


def store_of(parts: Parts, files: CrashingFiles) -> StateStore:
    mesh = parts.mesh
    return StateStore(Path("/run"), mesh.world, coordinates=mesh.coordinates, files=files)


def kept(parts: Parts) -> Kept:
    found = {n: p.parameter.detach().clone() for n, p in parts.model.pieces.items()}
    for each in held(parts.optimizer).values():
        for key, value in each.values.items():
            found[f"{each.name} {key}"] = torch.as_tensor(value).clone()
    parts.model.gather()
    for number, stage in parts.model.stages.items():
        for name, parameter in stage.named_parameters():
            found[f"stage {number} {name}"] = parameter.detach().clone()
    return found


def assert_same_bits(found: list[Any], wanted: list[Any]) -> None:
    for (one, steps), (other, others) in zip(found, wanted, strict=True):
        assert repr(steps) == repr(others)  # a norm may be NaN
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


RUNS: list[dict[str, Any]] = [
    {"layout": "dp=1", "zero": 1},
    {"layout": "dp=2", "zero": 2, "reduce": "microbatch", "microbatches": 2, "dtype": "bfloat16"},
    {"layout": "dp=2", "zero": 2, "dtype": "float16", "initial_scale": 2.0**20},
    {"layout": "dp=2,tp=2", "zero": 3, "dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    {"layout": "dp=2,pp=2", "zero": 3, "microbatches": 2, "model": "tiny-tied"},
    {"layout": "dp=1", "zero": 3, "optimizer": "lion", "lr": 1e-4, "qk_clip": 0.05},
    {"layout": "dp=1", "zero": 0, "optimizer": "sgd", "lr": 1e-2},
    # Norms see a part of the positions on each rank: their sums are not what backwards add to.
    {"layout": "tp=2", "zero": 0, "sequence_parallel": True},
    {"layout": "dp=2", "zero": 0, "dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    # One rank has both ends of the model, which share a weight: it makes one model, the other two.
    {"layout": "pp=2", "zero": 1, "schedule": "zb-v", "microbatches": 2, "model": "tiny-tied"},
]


@pytest.mark.parametrize("leaves", RUNS, ids=lambda leaves: " ".join(map(str, leaves.values())))
def test_offload_changes_no_bit(leaves: dict[str, Any], tmp_path: Path) -> None:
    wanted = run(leaves)

    for mode in modes(leaves, tmp_path):
        assert_same_bits(run({**leaves, "offload": mode}), wanted)

    assert list(tmp_path.iterdir()) == []


def test_steps_that_overflow_are_skipped_as_without_offload(tmp_path: Path) -> None:
    _, steps = run({**RUNS[2], "offload": f"nvme:{tmp_path}"})[0]

    assert {verdict for _, _, verdict in steps} >= {Verdict.SKIP}


@pytest.mark.parametrize(
    ("layout", "leaves"),
    [
        ("dp=2,tp=2", {"microbatches": 2, "zero": 1, "offload": "optimizer"}),
        ("dp=2,pp=2", {"microbatches": 3, "zero": 3, "offload": "parameters"}),
        ("dp=3", {"microbatches": 2, "zero": 3, "gather": "unit", "offload": "nvme"}),
        pytest.param(
            "dp=2,pp=2",
            {"microbatches": 2, "zero": 2, "model": "tiny-tied", "offload": "nvme"},
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else given["offload"],
)
def test_an_offloaded_step_is_the_serial_step(
    layout: str, leaves: dict[str, Any], tmp_path: Path
) -> None:
    if leaves["offload"] == "nvme":
        leaves = {**leaves, "offload": f"nvme:{tmp_path}"}
    config = settings(dtype="float64", layout=layout, **leaves)
    shape = shape_of(config)
    snapshot, expected = serial_steps("float64", shape)[STEP]

    (found,) = steps_in_layout(config, shape, [snapshot])

    assert_same_step(config, found, snapshot, expected)


def test_a_run_goes_on_in_any_other_mode(tmp_path: Path) -> None:
    leaves = {"layout": "dp=2", "zero": 3, "dtype": "bfloat16", "lr_schedule": "constant"}
    before: CrashingFiles | None = None

    for updates, mode in enumerate(["none", f"nvme:{tmp_path}", "parameters", "optimizer"], 1):
        after = CrashingFiles()
        found = run({**leaves, "steps": updates, "offload": mode}, save=after, load=before)
        before = after

    wanted = run({**leaves, "steps": 4})
    last = [(rank, steps[-1:]) for rank, steps in wanted]
    assert_same_bits(found, last)


def test_the_step_after_a_resume_in_another_layout_and_mode_is_the_serial_step(
    tmp_path: Path,
) -> None:
    saved = settings(dtype="float64", layout="dp=2", zero=3, offload=f"nvme:{tmp_path}")
    resumed = settings(
        dtype="float64", layout="dp=2,tp=2", zero=1, microbatches=2, offload="optimizer"
    )
    shape = shape_of(resumed)
    snapshot, expected = serial_steps("float64", shape)[STEP]
    files = CrashingFiles()

    def save(comm: Communicator) -> None:
        parts = assemble(saved, comm, text(), shape)
        save_state(store_of(parts, files), parts, load_snapshot(parts, snapshot))

    def go_on(comm: Communicator) -> RankSteps:
        parts = assemble(resumed, comm, text(), shape)
        gradients = observe_gradients(parts)
        progress = restore_state(store_of(parts, files), parts)
        assert progress is not None
        return [step_from(parts, gradients, progress)]

    LocalWorld(2, timeout_s=60.0).run(save)
    ranks = LocalWorld(4, timeout_s=60.0).run(go_on)

    assert_same_step(resumed, join_steps(ranks)[0], snapshot, expected)


@pytest.mark.parametrize("to_file", [False, True], ids=["host", "file"])
def test_going_back_restores_offloaded_states(to_file: bool, tmp_path: Path) -> None:
    mode = f"nvme:{tmp_path}" if to_file else "parameters"
    config = RunConfig.of(**{**SHORT, "layout": "dp=2", "zero": 3, "offload": mode})

    def work(world: Communicator) -> list[Kept]:
        parts = assemble(config, world, text(), SHAPE)
        progress = parts.start()
        live = LiveState(parts, progress)
        seen: list[Kept] = []
        for steps in (1, 2, 4):
            train(attrs.evolve(parts, config=config.evolve(steps=steps)), progress)
            parts.model.release()
            seen.append(kept(parts))
            parts.model.release()
            if steps == 2:
                taken = copy.deepcopy(live.state_dict())
        live.load_state_dict(taken)
        return [*seen, kept(parts)]

    for _, before, after, restored in LocalWorld(2, timeout_s=60.0).run(work):
        assert any(not torch.equal(before[name], after[name]) for name in before)
        assert all(torch.equal(before[name], restored[name]) for name in before)


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"offload": "parameters", "zero": 2}, "--offload parameters needs --zero 3"),
        ({"offload": "optimizer", "optimizer": "muon"}, "muon has to see whole parameters"),
        ({"offload": "optimizer", "optimizer": "adafactor"}, "adafactor has to see whole"),
        ({"offload": "nvme:/tmp", "async_save": True, "save_every": 2}, "--async-save keeps a"),
        ({"offload": "nvme:/no/such/folder"}, "it is no folder"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_cannot_be_offloaded_is_refused(leaves: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(leaves)


def test_states_in_a_file_are_not_copied_to_memory_to_go_back_to(tmp_path: Path) -> None:
    def said(**leaves: object) -> str:
        config = RunConfig.of(**{**SHORT, "steps": 1, **leaves})
        parts = assemble(config, SingleCommunicator(), text(), SHAPE)
        return describe_snapshots(parts, parts.start())

    asking = tmp_path / "guards.json"
    asking.write_text('{"guards": {}, "snapshots": 1}')
    in_file = f"nvme:{tmp_path}"

    assert "copy to memory what a file keeps" in said(offload=in_file)
    assert said(offload="optimizer").startswith("2 snapshots")
    with pytest.raises(ConfigError, match=r"1 snapshots are copies.*--offload optimizer"):
        said(offload=in_file, guards=str(asking))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cpu", "must be one of none, optimizer, parameters, nvme:DIR, got cpu"),
        ("nvme:", "name a folder, such as nvme:/local/disk"),
        ("nvme", "name a folder"),
    ],
)
def test_other_places_are_refused_by_name(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.of(offload=value)


def test_an_optimizer_of_yours_that_sees_wholes_is_refused_with_offload() -> None:
    config = RunConfig.of(**{**SHORT, "layout": "dp=2", "zero": 1, "offload": "optimizer"})

    def work(world: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            assemble(config, world, text(), SHAPE, optimizer=torch.optim.Adafactor)
        return str(caught.value)

    said = LocalWorld(2, timeout_s=60.0).run(work)

    assert all("the optimizer of yours has to see whole parameters" in text for text in said)


def test_space_that_one_stage_of_a_pipeline_lacks_is_refused_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = {"layout": "dp=2,pp=2", "microbatches": 2, "zero": 1, "offload": f"nvme:{tmp_path}"}
    config = RunConfig.of(**{**SHORT, **leaves})
    usual = FileStore.reserve
    asked: list[FileStore] = []

    def not_at_first(store: FileStore, sizes: Iterable[int]) -> None:
        asked.append(store)
        if asked[0] is store:
            raise OffloadError("the disk is full")
        usual(store, sizes)

    monkeypatch.setattr(FileStore, "reserve", not_at_first)

    def work(world: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            assemble(config, world, text(), SHAPE)
        return str(caught.value)

    said = LocalWorld(4, timeout_s=60.0).run(work)

    assert all("the disk is full" in text for text in said)


def test_a_folder_that_one_rank_cannot_write_to_is_refused_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.of(**{**SHORT, "layout": "dp=2", "zero": 1, "offload": f"nvme:{tmp_path}"})
    usual = os.open
    opened: list[int] = []

    def only_once(path: object, flags: int, *rest: int, **more: int) -> int:
        if path == tmp_path or Path(str(path)).parent == tmp_path:
            if opened:
                raise OSError(errno.EACCES, "Permission denied")
            opened.append(flags)
        return usual(path, flags, *rest, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", only_once)

    def work(world: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            assemble(config, world, text(), SHAPE)
        return str(caught.value)

    said = LocalWorld(2, timeout_s=60.0).run(work)

    assert all("cannot be kept in" in text and "Permission denied" in text for text in said)
