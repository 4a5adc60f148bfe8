"""Ending early together, telling how ranks have ended, and when those that are left go on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.config import RunConfig
from trainwright.integration.endings import Ending, ending_of, waking
from trainwright.integration.errors import ConfigError
from trainwright.integration.restarting import RESTARTS, StartOptions, fitted, run_with_restarts
from trainwright.integration.stopping import (
    STOPPED,
    NeverStop,
    Stop,
    StopWhenAsked,
    stop_on_signals,
)
from trainwright.sharding import Mesh, MeshShape, one_norm
from trainwright.stability_guards import Report, Verdict


def step(mesh: Mesh, stop: Stop, number: int) -> Report:
    totals = one_norm(
        mesh, [], loss_sum=4.0, tokens=2, verdict=stop.level, num_verdicts=stop.num_levels
    )
    return stop.read(number, totals, 1.0, {"told": torch.tensor(3.0)})


def test_all_ranks_end_after_the_step_in_which_one_of_them_was_asked() -> None:
    def work(world: Communicator) -> list[tuple[bool, Report]]:
        mesh, stop = Mesh(world, MeshShape(dp=world.size)), StopWhenAsked()
        seen = []
        for number in range(3):
            if number == 1 and world.rank == 2:
                stop.ask()
            report = step(mesh, stop, number)
            seen.append((stop.agreed, report))
        return seen

    results = LocalWorld(3).run(work)

    assert [agreed for agreed, _ in results[0]] == [False, True, True]
    assert results[0] == results[1] == results[2]
    for _, report in results[0]:
        assert (report.loss, report.tokens, report.value("told")) == (2.0, 6, 3.0)
        assert report.local_verdict is Verdict.CONTINUE


def test_a_run_that_never_stops_says_nothing_more_in_the_reduction() -> None:
    def work(world: Communicator) -> tuple[int, Report]:
        stop = NeverStop()
        return stop.num_levels, step(Mesh(world, MeshShape()), stop, 0)

    levels, report = LocalWorld(1).run(work)[0]

    assert levels == len(Verdict)
    assert dict(report.signals) == {"told": 3.0}


def test_a_signal_asks_once_and_then_does_what_it_did_before() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with stop_on_signals([signal.SIGUSR1]) as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.level == len(Verdict)
            assert heard == []
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard == [signal.SIGUSR1]
        with stop_on_signals([signal.SIGUSR1]):
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("exitcode", "message", "code", "lost"),
    [
        (-signal.SIGKILL, None, 1, 1),
        (1, "RuntimeError: CUDA error: device-side assert triggered", 1, 1),
        (1, "PeerFailedError: rank 3 has gone", 1, 1),
        (1, "HaltError: too many steps were skipped", 1, 0),
        (1, "SaveFailedError: no space left on rank 0", 1, 0),
        (2, None, 2, 0),
        (STOPPED, None, STOPPED, 0),
    ],
)
def test_only_ranks_that_were_lost_are_worth_another_start(
    tmp_path: Path, exitcode: int, message: str | None, code: int, lost: int
) -> None:
    path = tmp_path / "error.json"
    if message is not None:
        told = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        path.write_text(json.dumps({"message": told}))
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=exitcode, error_file=str(path))

    ending = ending_of(ChildFailedError("train", {1: failure}))

    assert (ending.code, ending.lost) == (code, lost)
    assert bool(ending.reason) == (code != STOPPED)


def test_stopped_ranks_are_woken_once_one_has_ended_before_all_had_begun() -> None:
    spawn = multiprocessing.get_context("spawn")
    stopped = spawn.Process(target=signal.raise_signal, args=(signal.SIGSTOP,))
    brief = spawn.Process(target=time.sleep, args=(1.0,))
    try:
        with waking(3):
            stopped.start()
            brief.start()
            stopped.join(60.0)

        assert stopped.exitcode == 0
    finally:
        for process in (stopped, brief):
            process.kill()
            process.join()


def test_ranks_that_are_left_go_on_until_restarts_or_layouts_are_used_up(tmp_path: Path) -> None:
    config = RunConfig.of(layout="dp=4,tp=2", global_batch=12, microbatches=1)
    lost = Ending(1, "rank 3 failed", lost=1)

    def outcome(endings: list[Ending], options: StartOptions) -> tuple[int, list[str]]:
        left, layouts = iter(endings), []

        def start(current: RunConfig, again: bool) -> Ending:
            assert again == bool(layouts)
            assert current.sizes.global_batch == 12
            layouts.append(f"{current.parallel.layout}/{current.sizes.microbatches}")
            return next(left)

        code = run_with_restarts(config, tmp_path, start, options, lambda current: None)
        return code, layouts

    often = StartOptions(max_restarts=3)
    assert outcome([lost, lost, Ending(0)], often) == (
        0,
        ["dp=4,tp=2/1", "dp=3,tp=2/2", "dp=2,tp=2/2"],
    )
    assert outcome([lost, Ending(STOPPED)], often)[0] == STOPPED
    assert outcome([Ending(1, "HaltError")], often) == (1, ["dp=4,tp=2/1"])
    assert outcome([lost, lost], StartOptions(max_restarts=1)) == (
        1,
        ["dp=4,tp=2/1", "dp=3,tp=2/2"],
    )
    assert len(outcome([lost] * 2, StartOptions(max_restarts=3, min_ranks=6))[1]) == 2
    rows = [json.loads(line) for line in (tmp_path / RESTARTS).read_text().splitlines()]
    assert {row["layout"] for row in rows} == {"dp=3,tp=2", "dp=2,tp=2"}
    assert {row["reason"] for row in rows} == {"rank 3 failed"}


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 86401.0])
def test_ranks_wait_for_each_other_between_a_second_and_a_day(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"--comm-timeout must be from 1 second to a day"):
        StartOptions(comm_timeout=seconds)


def test_batches_that_grow_by_what_ranks_share_out_must_say_by_how_much() -> None:
    ramp = {"global_batch": 24, "microbatches": 2, "ramp_from": 12, "ramp_over": 240}
    config = RunConfig.of(layout="dp=2", **ramp)
    with pytest.raises(ConfigError, match="give --ramp-by"):
        fitted(config, 1, exactly=True)
    assert fitted(config.evolve(ramp_by=12), 1, exactly=True).sizes.microbatches == 4
