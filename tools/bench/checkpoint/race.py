"""What the processes of a timed run do: all contestants in turn, in the same processes."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import attrs
import torch
import torch.distributed as dist

from tools.bench.checkpoint.contestants import LOADERS, SAVERS, STARTERS, Contestant, State
from tools.bench.checkpoint.state import (
    empty_like,
    largest_part,
    make_state,
    num_bytes,
    width_of,
)
from tools.bench.rounds import interleave
from trainwright.collectives import Communicator

KINDS = ("save", "asynchronous", "load")
_SAMPLE_S = 0.001


@attrs.frozen
class Plan:
    """What to time.

    Args:
        root: The folder for all files; each rank sees the same one.
        gib: About how much the whole state has.
        kinds: Which of `KINDS`.
        rounds: How often each contestant has its turn.
        is_cold: Whether files leave the page cache before they are read.
    """

    root: Path
    gib: float
    kinds: tuple[str, ...]
    rounds: int
    is_cold: bool


@attrs.frozen
class Outcome:
    """What one rank saw.

    Args:
        num_bytes: Bytes of the whole state.
        largest: Bytes of the largest part of this rank.
        seconds: By kind and contestant, of each round. Of asynchronous saves that is how long the
            call held the step up.
        behind: How long an asynchronous save was under way after that.
        extra: Bytes of private memory that a load took at most beside the state, by contestant.
        agrees: Whether each load gave the bits that were saved, by contestant.
    """

    num_bytes: int
    largest: int
    seconds: dict[str, dict[str, list[float]]] = attrs.Factory(dict)
    behind: dict[str, list[float]] = attrs.Factory(dict)
    extra: dict[str, int] = attrs.Factory(dict)
    agrees: dict[str, bool] = attrs.Factory(dict)


def race(world: Communicator, plan: Plan) -> Outcome:
    """Time what the plan says; each file is gone when the next contestant begins."""
    state = make_state(width_of(plan.gib, world.size), world.rank, world.size)
    outcome = Outcome(num_bytes(state), largest_part(state))
    runs = {"save": _saves, "asynchronous": _asynchronous_saves, "load": _loads}
    gc.collect()
    gc.freeze()
    for kind in plan.kinds:
        runs[kind](world, plan, state, outcome)
    return outcome


def _saves(world: Communicator, plan: Plan, state: State, outcome: Outcome) -> None:
    with _built(SAVERS, world) as contestants:
        seconds = outcome.seconds["save"] = {name: [] for name in contestants}
        for name in _turns(contestants, plan):
            with _folder(world, plan) as folder:
                seconds[name].append(_time(partial(contestants[name].save, state, folder)))


def _asynchronous_saves(world: Communicator, plan: Plan, state: State, outcome: Outcome) -> None:
    with _built(STARTERS, world) as contestants:
        seconds = outcome.seconds["asynchronous"] = {name: [] for name in contestants}
        outcome.behind.update({name: [] for name in contestants})
        for name in _turns(contestants, plan):
            with _folder(world, plan, name) as folder:
                dist.barrier()
                start = time.perf_counter()
                wait = contestants[name].start(state, folder)
                seconds[name].append(time.perf_counter() - start)
                wait()
                whole = time.perf_counter() - start
                outcome.behind[name].append(whole - seconds[name][-1])


def _loads(world: Communicator, plan: Plan, state: State, outcome: Outcome) -> None:
    target = empty_like(state)
    with _built(LOADERS, world) as contestants:
        seconds = outcome.seconds["load"] = {name: [] for name in contestants}
        folders = {}
        for name, contestant in contestants.items():
            folders[name] = _make_folder(world, plan, name)
            contestant.save(state, folders[name])
            outcome.extra[name] = _extra_memory(partial(contestant.load, target, folders[name]))
            outcome.agrees[name] = _are_equal(state, target)
            for part in target.values():
                part.tensor.zero_()
        for name in _turns(contestants, plan):
            if plan.is_cold and world.rank == 0:
                _forget(folders[name])
            load = partial(contestants[name].load, target, folders[name])
            seconds[name].append(_time(load))
        for folder in folders.values():
            _remove(world, folder)


def _turns(contestants: Mapping[str, Contestant], plan: Plan) -> Iterator[str]:
    """Yield whose turn it is; the first round warms up and is timed as well, but not counted."""
    for order in interleave(tuple(contestants), plan.rounds + 1):
        yield from order


def _time(work: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def _built(
    builders: Mapping[str, Callable[[Communicator], Contestant]], world: Communicator
) -> Iterator[dict[str, Contestant]]:
    contestants = {name: build(world) for name, build in builders.items()}
    yield contestants
    for contestant in contestants.values():
        contestant.close()


@contextmanager
def _folder(world: Communicator, plan: Plan, name: str = "save") -> Iterator[Path]:
    folder = _make_folder(world, plan, name)
    yield folder
    _remove(world, folder)


def _make_folder(world: Communicator, plan: Plan, name: str) -> Path:
    folder = plan.root / name
    if world.rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    return folder


def _remove(world: Communicator, folder: Path) -> None:
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(folder)
        os.sync()  # so that the next contestant finds a disk without work
    dist.barrier()


def _forget(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _are_equal(state: State, other: State) -> bool:
    return all(torch.equal(part.tensor, other[name].tensor) for name, part in state.items())


def _extra_memory(work: Callable[[], object]) -> int:
    """Return how far the private memory of this process rises while it works."""
    done = threading.Event()
    before = _private_bytes()
    most = [before]

    def watch() -> None:
        while not done.wait(_SAMPLE_S):
            most.append(max(most.pop(), _private_bytes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return most[0] - before


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no line RssAnon")
