"""The examples train: on threads, on processes, and what a reader may change in them."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch._dynamo  # noqa: F401 - what optimizers import: once, before ranks are forked
import torch.distributed as dist

from trainwright.collectives import LocalWorld, TorchCommunicator
from trainwright.collectives.testing import run_processes

EXAMPLES = Path(__file__).parents[1] / "examples"
ALLOWED = {
    "ddp_precision": {"precision"},
    "zero3_recompute": {"sharding", "checkpointing"},
    "pipeline_guards": {"pipeline_schedules", "stability_guards"},
}
DEADLINE_S = 120.0
# Float32, a dozen updates, sums of some thousand terms in another order.
TOLERANCE = 1e-4


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def are_close(found: list[float], right: list[float]) -> bool:
    return all(abs(a - b) <= TOLERANCE * b for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_an_example_is_short_and_stands_on_single_packages(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    tree = ast.walk(ast.parse(text))
    modules = [node.module or "" for node in tree if isinstance(node, ast.ImportFrom)]
    ours = set()
    for module in modules:
        top, *rest = module.split(".")
        if top == "trainwright":
            ours.update(rest[:1] or re.findall(r"from trainwright import (\w+)", text))

    assert text.count("\n") < 120
    assert ours == ALLOWED[name] | {"collectives"}


def train_replicas(world: TorchCommunicator, steps: int, dtype: str) -> list[float]:
    losses: list[float] = example("ddp_precision").main(world, steps, dtype)
    return losses


@pytest.mark.processes
def test_two_processes_of_ddp_train_in_16_bits_as_one_does() -> None:
    found = run_processes(train_replicas, 2, 6, "float16", timeout_s=DEADLINE_S)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = train_replicas(TorchCommunicator(), 6, "float16")
    finally:
        dist.destroy_process_group()

    assert found[0] == found[1] == pytest.approx(alone, rel=1e-3)  # float16 has 11 bits
    assert alone[-1] < alone[0] - 0.5


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_an_example_runs_under_torchrun_and_its_loss_falls(name: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*command, str(EXAMPLES / f"{name}.py"), "--steps", "21"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        printed, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.terminate()  # which torchrun passes on to its workers
        process.wait(timeout=60)

    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert process.returncode == 0
    assert len(losses) == 3
    assert losses[0] - 1.5 > losses[1] > losses[2]


def test_zero_3_goes_on_from_a_checkpoint_of_other_ranks(tmp_path: Path) -> None:
    train = example("zero3_recompute").main

    (whole,) = LocalWorld(1).run(train, 6)
    before = LocalWorld(2).run(train, 3, str(tmp_path))
    after = LocalWorld(3).run(train, 6, str(tmp_path))

    assert are_close(before[0] + after[0], whole)
    assert after[0] == after[2]
    assert whole[-1] < whole[0] - 0.5


def test_a_pipeline_trains_alike_by_any_schedule() -> None:
    train = example("pipeline_guards").main

    (alone,) = LocalWorld(1).run(train, 6)
    for ranks, schedule in ((2, "zb-v"), (3, "interleaved-1f1b")):
        found = LocalWorld(ranks).run(train, 6, schedule)
        assert are_close(found[0], alone)
        assert found[0] == found[1]

    assert alone[-1] < alone[0] - 1


@pytest.mark.long
def test_a_spoiled_batch_is_left_out_and_training_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses = LocalWorld(2).run(example("pipeline_guards").main, 100, "1f1b", 90)[0]

    skipped = [line for line in capsys.readouterr().out.splitlines() if "SKIP" in line]
    assert len(skipped) == 1
    assert skipped[0].startswith("step   90")
    assert losses[90] > 8
    assert max(losses[91:]) < 3


@pytest.mark.parametrize(
    ("name", "ranks", "arguments", "words"),
    [
        ("zero3_recompute", 5, (2,), "12 rows do not divide over 5 ranks; use 1, 2, 3, 4 or 6"),
        ("pipeline_guards", 8, (2,), "7 layers cannot fill 8 stages"),
        ("pipeline_guards", 2, (2, "forward-only"), "a forward-only schedule has no step"),
    ],
)
def test_what_does_not_fit_is_told_before_training(
    name: str, ranks: int, arguments: tuple[object, ...], words: str
) -> None:
    with pytest.raises(BaseException, match=words):
        LocalWorld(ranks).run(example(name).main, *arguments)
