"""All-reduces by an algorithm over messages and by Gloo itself, in turns on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from tools.bench.rounds import interleave
from trainwright.collectives import Communicator, TorchCommunicator
from trainwright.collectives.algorithms import (
    bidirectional_ring_all_reduce,
    halving_doubling_all_reduce,
    ring_all_reduce,
)

REFERENCE = "gloo"
ALGORITHMS: dict[str, Callable[[Communicator, torch.Tensor], None]] = {
    "ring": ring_all_reduce,
    "bidirectional_ring": bidirectional_ring_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
}
_ROUND_S = 0.03
_MAX_STEPS = 100

Seconds = dict[str, list[float]]


def time_all_reduces(
    world: Communicator, names: tuple[str, ...], sizes: tuple[int, ...], rounds: int
) -> list[Seconds]:
    """Return for each size the seconds of an all-reduce, by contestant and round.

    Args:
        world: The ranks; the algorithms use connections of their own.
        names: Which of `ALGORITHMS` besides Gloo's own.
        sizes: Bytes of float32 numbers.
        rounds: How often each contestant has its turn.

    Raises:
        ArithmeticError: contestants do not get the same.
    """
    comm = TorchCommunicator()
    outcomes = []
    for num_bytes in sizes:
        tensor = torch.empty(max(1, num_bytes // 4))
        runs: dict[str, Callable[[], object]] = {REFERENCE: partial(dist.all_reduce, tensor)}
        for name in names:
            runs[name] = partial(ALGORITHMS[name], comm, tensor)
        _check(world, runs, tensor)
        tensor.zero_()
        steps = _choose_steps(runs[REFERENCE])
        seconds: Seconds = {name: [] for name in runs}
        for order in interleave(tuple(runs), rounds):
            for name in order:
                seconds[name].append(_time(runs[name], steps))
        outcomes.append(seconds)
    return outcomes


def _check(
    world: Communicator, runs: dict[str, Callable[[], object]], tensor: torch.Tensor
) -> None:
    given = torch.arange(tensor.numel()) % 7
    expected = given * world.size + sum(range(world.size))
    for name, run in runs.items():
        tensor.copy_(given + world.rank)
        run()
        if not torch.equal(tensor, expected.float()):
            raise ArithmeticError(f"{name}, {tensor.nbytes} bytes: wrong on rank {world.rank}")


def _choose_steps(run: Callable[[], object]) -> int:
    """Return how many operations fill a round; the same number on all ranks."""
    seconds = torch.tensor([_time(run, 2)])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return max(1, min(_MAX_STEPS, int(_ROUND_S / seconds.item())))


def _time(run: Callable[[], object], steps: int) -> float:
    # Others have been here since: the caches hold their data.
    run()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        run()
    return (time.perf_counter() - start) / steps
