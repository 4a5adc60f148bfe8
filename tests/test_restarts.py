"""Runs that lose ranks, are told to leave, or are spread over nodes: what goes on from where."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.running import Running, metrics, started, wait_until
from trainwright.checkpointing.state import StateStore
from trainwright.integration import saver
from trainwright.integration.cli import main
from trainwright.integration.recipe import StepRecord

STEPS = 400
"""More than any run here makes: what decides the learning rates."""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SLURM = Path(__file__).parents[1] / "integration" / "examples" / "slurm.sh"

pytestmark = pytest.mark.processes


@pytest.fixture
def common(tmp_path: Path) -> list[str]:
    book = tmp_path / "book.txt"
    book.write_bytes((Path(__file__).parents[1] / "LICENSE").read_bytes())
    small = "--sequence-length 32 --global-batch 12 --evaluate-sequences 8 --sample-bytes 4"
    often = f"--dtype float64 --save-every 2 --steps {STEPS}"
    return [*small.split(), *often.split(), "--data", str(book)]


def steps_of(run: Path) -> list[int]:
    return [row["step"] for row in metrics(run)]


def go_on(common: list[str], run: Path, more: int) -> None:
    """Make some more steps of a run on one rank, in this process, to a stop that a signal asks."""
    wanted = max(steps_of(run), default=0) + more
    threads = ["train", *common, "--layout", "dp=1", "--microbatches", "1", "--threads-as-ranks"]
    with asked_at(wanted):
        assert main([*threads, "--save-on-signal", "--elastic", "--out", str(run)]) == 75


@contextmanager
def asked_at(step: int) -> Iterator[None]:
    """Raise a signal in this process when its run is in a step."""
    save = saver.Saver.__call__

    def saved(observer: saver.Saver, record: StepRecord) -> None:
        save(observer, record)
        if record.step == step - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver.Saver, "__call__", saved)
        yield


def assert_as_serial(common: list[str], run: Path, serial: Path) -> None:
    """The losses of a run are those of one rank that was never stopped."""
    go_on(common, serial, max(steps_of(run)))
    assert steps_of(run) == list(range(1, max(steps_of(run)) + 1))
    for found, right in zip(metrics(run), metrics(serial), strict=True):
        assert found["lr"] == right["lr"]
        for key in ("loss", "grad_norm"):
            assert abs(found[key] - right[key]) <= 1e-10 * abs(right[key])


def has_workers(running: Running, number: int) -> bool:
    return len(running.workers()) == number


def wait_for_step(run: Path, step: int) -> None:
    wait_until(lambda: max(steps_of(run), default=0) >= step, 120)


def test_a_run_outlives_a_rank_and_a_signal_and_computes_what_it_would_have(
    tmp_path: Path, common: list[str]
) -> None:
    run = tmp_path / "run"
    layout = ["--layout", "dp=2,tp=2", "--microbatches", "2", "--max-restarts", "1"]

    with started([*common, *layout, "--save-on-signal", "--out", str(run)]) as running:
        wait_for_step(run, 5)
        os.kill(running.workers()[2], signal.SIGKILL)
        wait_until(lambda: (run / "restarts.jsonl").exists(), 60)
        wait_until(lambda: len(running.workers()) == 2, 60)
        wait_for_step(run, 8)
        os.kill(running.workers()[1], signal.SIGUSR1)  # one rank alone is told
        _, errors = running.process.communicate(timeout=120)
        wait_until(lambda: running.members() == {}, 10)

    assert running.process.returncode == 75
    assert "rank 2 failed" in errors
    assert "--layout tp=2 and 4 microbatches" in errors
    last = max(steps_of(run))
    assert StateStore(run / "checkpoints").latest() == last
    assert f"after step {last}, step {last} was saved" in errors
    go_on(common, run, 2)
    assert_as_serial(common, run, tmp_path / "serial")


@pytest.mark.long
def test_a_lost_rank_of_four_leaves_three_where_the_batch_divides(
    tmp_path: Path, common: list[str]
) -> None:
    run = tmp_path / "run"
    layout = ["--layout", "dp=4", "--microbatches", "1", "--zero", "1", "--max-restarts", "2"]

    with started([*common, *layout, "--min-ranks", "3", "--out", str(run)]) as running:
        for left, rank in ((3, 0), (0, 1)):
            wait_for_step(run, max(steps_of(run), default=0) + 3)
            os.kill(running.workers()[rank], signal.SIGKILL)
            wait_until(functools.partial(has_workers, running, left), 60)
        _, errors = running.process.communicate(timeout=120)

    assert running.process.returncode == 1
    assert "--layout dp=3 and 2 microbatches" in errors
    assert "2 ranks do not fit --layout dp=4" in errors
    assert "at least 3 being asked for" in errors
    assert_as_serial(common, run, tmp_path / "serial")


@pytest.mark.long
@pytest.mark.parametrize("again", [False, True])
def test_a_signal_to_the_launcher_saves_and_a_second_one_does_not_wait(
    tmp_path: Path, common: list[str], again: bool
) -> None:
    run = tmp_path / "run"
    with started([*common, "--layout", "dp=2", "--save-on-signal", "--out", str(run)]) as running:
        wait_for_step(run, 3)
        stopped = signal.SIGSTOP if again else signal.SIGCONT
        os.kill(running.workers()[0], stopped)  # a rank that will not end its step
        running.process.send_signal(signal.SIGTERM)
        if again:
            time.sleep(1)
            running.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        running.process.communicate(timeout=120)
        wait_until(lambda: running.members() == {}, 10)

    assert time.monotonic() - began < 50
    assert running.process.returncode == (128 + signal.SIGTERM if again else 75)
    if not again:
        assert StateStore(run / "checkpoints").latest() == max(steps_of(run))


@contextmanager
def two_agents(nodes: str, restarts: int, *train: str) -> Iterator[tuple[Running, Running]]:
    """Start two torchrun agents of two processes each; the first has the port where they meet."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [*TORCHRUN, f"--nnodes={nodes}", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test"]
    arguments = ["-m", "trainwright.integration", "train", *train]
    lo = {"GLOO_SOCKET_IFNAME": "lo"}
    with (
        started([*arguments], [*command, "--rdzv-conf=is_host=1"], lo) as first,
        started([*arguments], [*command, "--rdzv-conf=is_host=0"], lo) as second,
    ):
        yield first, second


@pytest.mark.long
def test_two_nodes_of_two_processes_train_one_run(tmp_path: Path, common: list[str]) -> None:
    run, serial = tmp_path / "run", tmp_path / "serial"
    few = [*common, "--steps", "6"]

    with two_agents("2", 0, *few, "--layout", "dp=2,tp=2", "--out", str(run)) as agents:
        for agent in agents:
            _, errors = agent.process.communicate(timeout=200)
            assert agent.process.returncode == 0, errors
    assert main(["train", *few, "--threads-as-ranks", "--out", str(serial)]) == 0

    for found, right in zip(metrics(run), metrics(serial), strict=True):
        assert abs(found["loss"] - right["loss"]) <= 1e-10 * abs(right["loss"])
    assert StateStore(run / "checkpoints").latest() == 6
    assert (run / "loss.png").exists()


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_agent_ends_both_nodes_within_seconds(
    tmp_path: Path, common: list[str], killed: int
) -> None:
    run = tmp_path / "run"
    with two_agents("2", 0, *common, "--layout", "dp=2,tp=2", "--out", str(run)) as agents:
        wait_for_step(run, 2)
        agents[killed].process.kill()
        began = time.monotonic()
        agents[1 - killed].process.communicate(timeout=120)
        seconds = time.monotonic() - began
        wait_until(lambda: not any(agent.members() for agent in agents), 30)

    assert agents[1 - killed].process.returncode != 0
    assert seconds < 60


@pytest.mark.long
def test_the_node_that_is_left_goes_on_with_half_the_data_ranks(
    tmp_path: Path, common: list[str]
) -> None:
    run = tmp_path / "run"
    elastic = ["--layout", "dp=2,tp=2", "--elastic", "--save-on-signal", "--out", str(run)]
    with two_agents("1:2", 2, *common, *elastic) as (host, other):
        wait_for_step(run, 3)
        for pid in [other.process.pid, *other.workers()]:
            os.kill(pid, signal.SIGKILL)
        wait_for_step(run, max(steps_of(run)) + 3)
        host.process.terminate()
        host.process.communicate(timeout=60)

    go_on(common, run, 2)
    assert_as_serial(common, run, tmp_path / "serial")


def test_the_slurm_script_is_a_script() -> None:
    assert subprocess.run(["bash", "-n", str(SLURM)], check=True).returncode == 0


FAKES = {
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        for node in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & echo $! >> "$FAKES/tasks"; done
        code=0; for task in $(cat "$FAKES/tasks"); do wait "$task" || code=$?; done
        rm "$FAKES/tasks"; exit "$code" """,
    "scontrol": """
        if [[ $1 == show ]]; then echo localhost; else echo "$*" >> "$FAKES/done"; fi""",
    "scancel": 'kill -"${1#--signal=}" $(cat "$FAKES/tasks")',
}


@pytest.mark.long
def test_a_slurm_job_that_must_leave_saves_requeues_itself_and_goes_on_with_fewer_nodes(
    tmp_path: Path, common: list[str]
) -> None:
    run, fakes = tmp_path / "run", tmp_path / "fakes"
    fakes.mkdir()
    for name, text in FAKES.items():
        (fakes / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (fakes / name).chmod(0o755)
    given = {
        "PATH": f"{fakes}:{os.environ['PATH']}",
        "FAKES": str(fakes),
        "RUN": str(run),
        "PROCESSES": "1",
        "TRAINWRIGHT": " ".join(TORCHRUN),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    for restarts, nodes in enumerate((2, 1)):
        job = {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_RESTART_COUNT": str(restarts)}
        command = ["bash", str(SLURM)]
        with started([*common, "--layout", "dp=2"], command, {**given, **job}) as running:
            wait_for_step(run, max(steps_of(run), default=0) + 3)
            running.process.send_signal(signal.SIGUSR1)
            _, errors = running.process.communicate(timeout=120)
            assert running.process.returncode == 0, errors
            wait_until(functools.partial(has_workers, running, 0), 10)
        assert StateStore(run / "checkpoints").latest() == max(steps_of(run))

    assert (fakes / "done").read_text().splitlines() == [f"requeue {os.getpid()}"] * 2
    assert_as_serial(common, run, tmp_path / "serial")
