"""What optimizers keep is saved by name, goes on in any layout, and is left alone by skips."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from tests.optimizer_runs import CHOSEN, settings, shape_of
from tests.serial import text
from trainwright.checkpointing.state import StateStore
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration import optimizers
from trainwright.integration.cli import main
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.live_state import LiveState
from trainwright.integration.optimizers import OPTIMIZERS
from trainwright.integration.parts import Parts, Progress, assemble
from trainwright.integration.recipe import StepRecord, train
from trainwright.integration.training_state import (
    KIND,
    restore_state,
    save_state,
    state_tree,
)
from trainwright.stability_guards import MemorySnapshots

ROOT = Path("/run/checkpoints")
Kept = dict[str, Any]


def make(world: Communicator, config: RunConfig, chosen: CHOSEN = None) -> Parts:
    return assemble(config, world, text(), shape_of(config), optimizer=chosen)


def go_on(parts: Parts, progress: Progress, steps: int) -> Kept:
    """Train up to so many steps and return all that is kept then."""
    if steps:
        train(attrs.evolve(parts, config=parts.config.evolve(steps=steps)), progress)
    return kept(parts)


class EnoughError(Exception):
    """A step was made, of a run that would go on."""


def enough(record: StepRecord) -> None:
    raise EnoughError


def kept(parts: Parts) -> Kept:
    states = optimizers.snapshot(parts.optimizer)
    weights = {name: piece.parameter.detach() for name, piece in parts.model.pieces.items()}
    return copy.deepcopy({"weights": weights, "states": states})


def assert_equal(found: Any, right: Any, where: str = "") -> None:
    if isinstance(right, dict):
        assert found.keys() == right.keys(), where
        for key, value in right.items():
            assert_equal(found[key], value, f"{where} {key}")
    elif isinstance(right, torch.Tensor):
        assert found.dtype == right.dtype, where
        assert torch.equal(found, right), where
    else:
        assert found == right, where


def store_of(parts: Parts, files: CrashingFiles) -> StateStore:
    return StateStore(ROOT, parts.mesh.world, coordinates=parts.mesh.coordinates, files=files)


class Counting(torch.optim.Optimizer):
    """Counts in its options and in numbers of its states, as some optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "seen": 0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["seen"] += 1
            for weight in group["params"]:
                state = self.state[weight]
                state["rate"] = state.get("rate", 1.0) * 0.5
                state["turns"] = state.get("turns", 3) + 1
                state["sum"] = state.get("sum", 0.0) + weight.grad
                step = group["lr"] * state["rate"] / state["turns"] / group["seen"]
                weight -= step * state["sum"]


class Rowwise(Counting):
    """Keeps of a matrix what is neither of its shape nor a number."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                total = weight.grad.square().flatten(1).sum(1) if weight.dim() > 1 else 0.0
                self.state[weight]["rows"] = self.state[weight].get("rows", 0.0) + total


SAME_LAYOUT: list[tuple[dict[str, Any], CHOSEN, int]] = [
    ({"optimizer": "muon", "layout": "dp=2,ep=2", "model": "tiny-moe", "zero": 1}, None, 2),
    ({"layout": "dp=2", "zero": 1}, optimizers.element_wise(Counting), 2),
    ({"optimizer": "sgd", "layout": "dp=2,pp=2", "zero": 1, "microbatches": 2}, None, 2),
    ({"optimizer": "lion", "layout": "dp=2", "zero": 3}, None, 2),
    ({"optimizer": "adafactor", "layout": "dp=2,tp=2", "zero": 2}, None, 2),
    ({"layout": "dp=2", "zero": 2}, lambda groups: torch.optim.NAdam(groups), 2),
    ({"layout": "tp=2"}, optimizers.whole_parameters(Rowwise), 2),
    ({"optimizer": "muon", "layout": "dp=2", "zero": 2}, None, 0),
    ({"optimizer": "adafactor", "layout": "tp=2"}, None, 0),
    ({"layout": "dp=2", "zero": 3}, lambda groups: torch.optim.NAdam(groups), 0),
]


@pytest.mark.parametrize(
    ("changes", "chosen", "stop"),
    [
        pytest.param(*case, marks=pytest.mark.long if number > 1 else (), id=f"{number}")
        for number, case in enumerate(SAME_LAYOUT)
    ],
)
def test_a_run_resumed_in_the_same_layout_goes_on_bit_for_bit(
    changes: dict[str, Any], chosen: CHOSEN, stop: int
) -> None:
    files = CrashingFiles()

    def work(world: Communicator) -> None:
        config = settings(**changes, steps=4)
        first = make(world, config, chosen)
        progress = first.start()
        go_on(first, progress, stop)
        save_state(store_of(first, files), first, progress)
        right = go_on(first, progress, 4)
        second = make(world, config, chosen)
        restored = restore_state(store_of(second, files), second)
        assert restored is not None
        assert_equal(go_on(second, restored, 4), right)

    LocalWorld(settings(**changes).parallel.mesh.world_size, timeout_s=60.0).run(work)


MOVED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sgd", {"layout": "dp=2", "zero": 0}, {"layout": "tp=2,pp=2", "zero": 0, "microbatches": 2}),
    ("adafactor", {"layout": "tp=2", "zero": 0}, {"layout": "dp=4", "zero": 3}),
    ("muon", {"layout": "dp=2,tp=2", "zero": 1}, {"layout": "dp=2,pp=2", "zero": 3}),
]


def whole_after(config: RunConfig, files: CrashingFiles, steps: int) -> dict[str, torch.Tensor]:
    """Go on from what is saved, or the beginning, save, and return all weights."""

    def work(world: Communicator) -> dict[str, tuple[Any, torch.Tensor]]:
        parts = make(world, config)
        store = store_of(parts, files)
        progress = restore_state(store, parts) or parts.start()
        go_on(parts, progress, steps)
        save_state(store, parts, progress)
        return {
            name: (piece.spec, piece.parameter.detach().clone())
            for name, piece in parts.model.pieces.items()
        }

    whole: dict[str, torch.Tensor] = {}
    for rank in LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(work):
        for name, (spec, part) in rank.items():
            spec.insert(part.view(-1), whole.setdefault(name, part.new_zeros(spec.global_shape)))
    return whole


def assert_moves(name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    first = settings(optimizer=name, steps=4, **before)
    second = settings(optimizer=name, steps=4, **after)
    right = whole_after(first, CrashingFiles(), 4)
    files = CrashingFiles()
    whole_after(first, files, 2)

    found = whole_after(second, files, 4)

    for parameter, weight in right.items():
        apart = float((found[parameter] - weight).abs().max() / weight.abs().max())
        assert apart <= 1e-11, f"{parameter}: {apart:.1e}"  # of two steps, each within 1e-12


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [pytest.param(*c, marks=() if c[0] == "adafactor" else pytest.mark.long) for c in MOVED],
)
def test_states_go_on_in_another_layout_and_stage(
    name: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert_moves(name, before, after)


@pytest.mark.long
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"layout": "dp=4", "zero": 3}, {"layout": "dp=2,tp=2", "zero": 1}),
        ({"layout": "tp=2,pp=2", "microbatches": 2}, {"layout": "dp=1"}),
        ({"layout": "dp=1", "model": "tiny-tied"}, {"layout": "dp=2,pp=2", "model": "tiny-tied"}),
        (
            {"layout": "dp=2,tp=2,ep=4,etp=1", "zero": 2, "model": "tiny-moe"},
            {"layout": "dp=2,ep=2", "zero": 1, "model": "tiny-moe"},
        ),
    ],
)
def test_states_of_every_optimizer_go_on_in_other_layouts(
    name: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert_moves(name, before, after)


def test_a_checkpoint_of_another_optimizer_is_refused_on_every_rank() -> None:
    files = CrashingFiles()

    def work(world: Communicator) -> None:
        first = make(world, settings(layout="dp=2", zero=1))
        save_state(store_of(first, files), first, first.start())
        second = make(world, settings(layout="dp=2", zero=1, optimizer="muon"))
        with pytest.raises(ConfigError, match="states of AdamW, and this run has Muon and AdamW"):
            restore_state(store_of(second, files), second)

    LocalWorld(2, timeout_s=60.0).run(work)


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        pytest.param({"optimizer": "muon", "layout": "tp=2"}, None, marks=pytest.mark.long),
        ({"layout": "dp=2", "zero": 1}, optimizers.element_wise(Counting)),
        pytest.param({"optimizer": "sgd", "layout": "dp=2"}, None, marks=pytest.mark.long),
    ],
    ids=["muon", "counting", "sgd"],
)
def test_a_snapshot_in_memory_is_put_back_also_that_of_the_beginning(
    changes: dict[str, Any], chosen: CHOSEN
) -> None:
    def work(world: Communicator) -> None:
        parts = make(world, settings(**changes, steps=3), chosen)
        progress = parts.start()
        snapshots = MemorySnapshots({"run": LiveState(parts, progress)}, keep=3)
        position = parts.feed.state_dict()
        states = {}
        for step in range(3):
            snapshots.take(step)
            states[step] = kept(parts)
            go_on(parts, progress, step + 1)
        for step in (2, 0):
            snapshots.restore(step)
            assert_equal(kept(parts), states[step])
        parts.feed.load_state_dict(position)
        assert_equal(go_on(parts, progress, 2), states[2])

    LocalWorld(2, timeout_s=60.0).run(work)


@pytest.mark.parametrize(
    "name",
    ["muon", *(pytest.param(n, marks=pytest.mark.long) for n in ("sgd", "lion", "adafactor"))],
)
def test_a_step_that_overflows_leaves_the_optimizer_as_it_was(name: str) -> None:
    config = settings(optimizer=name, layout="dp=2", zero=1, steps=4).evolve(dtype="float16")

    def work(world: Communicator) -> None:
        parts = make(world, config)
        parts.scaler.load_state_dict({**parts.scaler.state_dict(), "scale": 2.0**40})
        progress = parts.start()
        before = kept(parts)
        with pytest.raises(EnoughError):
            train(parts, progress, [enough])
        skipped = kept(parts)
        assert (progress.updates, progress.skipped) == (0, 1)
        assert_equal(skipped, before)
        parts.scaler.load_state_dict({**parts.scaler.state_dict(), "scale": 2.0**8})
        go_on(parts, progress, 3)
        assert (progress.updates, progress.skipped) == (3, 1)
        for each in optimizers.held(parts.optimizer).values():
            assert float(each.values.get("step", 3)) == 3

    LocalWorld(2, timeout_s=60.0).run(work)


def test_a_checkpoint_from_before_there_was_a_choice_goes_on_with_adamw_only() -> None:
    files = CrashingFiles()

    def work(world: Communicator) -> None:
        first = make(world, settings(layout="dp=2", zero=1))
        progress = first.start()
        before = go_on(first, progress, 2)
        tree = state_tree(first, progress)
        del tree[KIND]
        store_of(first, files).save(2, tree)
        second = make(world, settings(layout="dp=2", zero=1))
        assert restore_state(store_of(second, files), second) is not None
        assert_equal(kept(second), before)
        other = make(world, settings(layout="dp=2", zero=1, optimizer="adam"))
        with pytest.raises(ConfigError, match="states of AdamW, and this run has Adam,"):
            restore_state(store_of(other, files), other)

    LocalWorld(2, timeout_s=60.0).run(work)


def test_an_optimizer_of_pieces_that_keeps_rows_is_refused_when_it_is_saved() -> None:
    def work(world: Communicator) -> None:
        parts = make(world, settings(layout="tp=2"), optimizers.element_wise(Rowwise))
        progress = parts.start()
        go_on(parts, progress, 1)
        with pytest.raises(ConfigError, match=r"Rowwise keeps 'rows', .*whole_parameters"):
            optimizers.tree(parts.optimizer)

    LocalWorld(2, timeout_s=60.0).run(work)


def halved_vectors(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """SGD that moves what does not decay half as far."""
    shares = [0.5 if group.get("weight_decay") == 0.0 else 1.0 for group in groups]
    return torch.optim.SGD(
        [
            {**group, "lr": share * group.get("lr", 1.0)}
            for group, share in zip(groups, shares, strict=True)
        ]
    )


@pytest.mark.parametrize("changes", [{"layout": "dp=2", "zero": 1}, {"layout": "tp=2"}])
def test_a_group_keeps_its_share_of_the_learning_rate_along_the_schedule(
    changes: dict[str, Any],
) -> None:
    config = settings(steps=3, **changes).evolve(warmup=2)

    def work(world: Communicator) -> None:
        parts = make(world, config, halved_vectors)
        seen: list[tuple[float, list[float]]] = []

        def observe(record: StepRecord) -> None:
            rates = [group["lr"] for group in parts.optimizer.param_groups]
            seen.append((record.lr, rates))

        before = kept(parts)["weights"]
        first = attrs.evolve(parts, config=config.evolve(steps=1))
        train(first, parts.start(), [observe])
        halved = kept(parts)["weights"]
        alike = make(world, config, torch.optim.SGD)
        train(attrs.evolve(alike, config=config.evolve(steps=1)), alike.start())
        for name, weight in kept(alike)["weights"].items():
            share = 1.0 if len(parts.model.pieces[name].spec.global_shape) > 1 else 0.5
            wanted = share * (weight - before[name])
            assert torch.allclose(halved[name] - before[name], wanted, rtol=1e-4, atol=1e-9), name
        train(parts, Progress(), [observe])
        for lr, rates in seen:
            assert rates == [lr, lr / 2]
        assert len({lr for lr, _ in seen}) > 1

    LocalWorld(2, timeout_s=60.0).run(work)


@pytest.mark.parametrize(
    "name",
    ["adafactor", *(pytest.param(n, marks=pytest.mark.long) for n in ("muon", "sgd", "lion"))],
)
def test_the_tool_goes_on_with_every_optimizer_in_another_layout_as_if_never_stopped(
    name: str, tmp_path: Path
) -> None:
    data = tmp_path / "book.txt"
    data.write_text("what was begun on some ranks is ended on others. " * 60)
    begin = ["train", "--data", str(data), "--optimizer", name, "--dtype", "float64"]
    begin += ["--lr", "0.01", "--warmup", "1", "--steps", "4", "--save-every", "2"]
    begin += ["--global-batch", "4", "--sequence-length", "16", "--measure-every", "0"]
    begin += ["--evaluate-sequences", "2", "--sample-bytes", "0"]
    whole, parts, threads = tmp_path / "whole", tmp_path / "parts", "--threads-as-ranks"
    before, after = ["--layout", "dp=2", "--zero", "2"], ["--layout", "pp=2", "--zero", "0"]

    assert main([*begin, threads, *before, "--out", str(whole)]) == 0
    shutil.copytree(whole, parts)
    for checkpoint in parts.glob("checkpoints/step-*4-*"):
        shutil.rmtree(checkpoint)
    assert main(["train", threads, "--resume", str(parts), *after]) == 0

    found, right = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (parts, whole)
    )
    assert [row["step"] for row in found] == [1, 2, 3, 4, 4]
    for row, wanted in zip(found, right, strict=True):
        for number in {"loss", "grad_norm", "held_out_loss"} & wanted.keys():
            assert row[number] == pytest.approx(wanted[number], rel=1e-9)
