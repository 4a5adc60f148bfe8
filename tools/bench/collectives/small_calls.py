"""Small calls as PyTorch makes them and as ours are made, in turns on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.rounds import interleave
from trainwright.collectives import Communicator, Recv, Send, TorchCommunicator
from trainwright.collectives.checked import CheckedCommunicator
from trainwright.collectives.failures import FailureBoard
from trainwright.collectives.native_backend import NativeBackend
from trainwright.collectives.rendezvous import nest

NAMES = ("bare", "torch", "native")
"""PyTorch's own call; `TorchCommunicator` over Gloo; the path that NCCL's groups take."""
NUMEL = 8

Run = Callable[[], object]
Seconds = dict[str, dict[str, list[tuple[float, float]]]]
"""By operation, contestant and round: of a call on the clock, and of all threads together."""


def time_calls(world: Communicator, names: tuple[str, ...], rounds: int, steps: int) -> Seconds:
    """Return the seconds of calls of the operations ``names``, or of all if there are none."""
    ways = {"bare": _bare(world), "torch": _ours(TorchCommunicator()), "native": _ours(_native())}
    seconds: Seconds = {name: {way: [] for way in NAMES} for name in names or ways["bare"]}
    for name, times in seconds.items():
        for order in interleave(NAMES, rounds):
            for way in order:
                times[way].append(_time(ways[way][name], steps))
    return seconds


def _bare(world: Communicator) -> dict[str, Run]:
    size, rank = world.size, world.rank
    small, large, other, rooted = _tensors(world)
    pieces = list(large.chunk(size)) if rank == 0 else None

    def exchange() -> None:
        messages = [
            dist.P2POp(dist.irecv, small, (rank - 1) % size),
            dist.P2POp(dist.isend, other, (rank + 1) % size),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    calls: dict[str, Run] = {
        "all_reduce": lambda: dist.all_reduce(small),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(small, large),
        "all_gather": lambda: dist.all_gather_into_tensor(large, small),
        "all_to_all": lambda: dist.all_to_all_single(large, rooted),
        "broadcast": lambda: dist.broadcast(small, 0),
        "reduce": lambda: dist.reduce(small, 0),
        "scatter": lambda: dist.scatter(small, pieces, 0),
        "gather": lambda: dist.gather(small, pieces, 0),
        "barrier": lambda: dist.barrier(),
    }
    return calls | ({"exchange": exchange} if size > 1 else {})


def _ours(comm: Communicator) -> dict[str, Run]:
    size, rank = comm.size, comm.rank
    small, large, other, rooted = _tensors(comm)
    root = large if rank == 0 else None

    def exchange() -> None:
        comm.exchange([Recv(small, (rank - 1) % size), Send(other, (rank + 1) % size)]).wait()

    calls: dict[str, Run] = {
        "all_reduce": lambda: comm.all_reduce(small).wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(small, large).wait(),
        "all_gather": lambda: comm.all_gather(large, small).wait(),
        "all_to_all": lambda: comm.all_to_all(large, rooted).wait(),
        "broadcast": lambda: comm.broadcast(small, 0).wait(),
        "reduce": lambda: comm.reduce(small, 0).wait(),
        "scatter": lambda: comm.scatter(small, root, 0).wait(),
        "gather": lambda: comm.gather(root, small, 0).wait(),
        "barrier": comm.barrier,
    }
    return calls | ({"exchange": exchange} if size > 1 else {})


def _tensors(comm: Communicator) -> tuple[torch.Tensor, ...]:
    # Zeros, because sums that grow from call to call would end in infinities.
    return tuple(torch.zeros(NUMEL * factor) for factor in (1, comm.size, 1, comm.size))


def _native() -> Communicator:
    group: Any = dist.group.WORLD
    board = FailureBoard(nest(group.get_group_store(), "overhead"), dist.get_rank())
    ranks = range(dist.get_world_size())
    return CheckedCommunicator(NativeBackend(group, torch.device("cpu"), ranks, "native", board))


def _time(run: Run, steps: int) -> tuple[float, float]:
    for _ in range(3):
        run()
    dist.barrier()
    start, work = time.perf_counter(), time.process_time()
    for _ in range(steps):
        run()
    elapsed, worked = time.perf_counter() - start, time.process_time() - work
    return elapsed / steps, worked / steps
