"""Sixty-four ranks in one process, each collective once."""

import time

import torch

from trainwright.collectives import Communicator, LocalWorld, Recv, Send, algorithms

N = 64


def call_everything(comm: Communicator) -> None:
    rank = comm.rank
    ranks = torch.arange(N)
    mine = torch.tensor([rank])
    total = torch.tensor([rank])
    comm.all_reduce(total).wait()
    assert total.item() == N * (N - 1) // 2
    gathered = torch.empty(N, dtype=torch.int64)
    comm.all_gather(gathered, mine).wait()
    assert torch.equal(gathered, ranks)
    scattered = torch.empty(1, dtype=torch.int64)
    comm.reduce_scatter(scattered, ranks + rank).wait()
    assert scattered.item() == N * rank + N * (N - 1) // 2
    exchanged = torch.empty(N, dtype=torch.int64)
    comm.all_to_all(exchanged, ranks + 1000 * rank).wait()
    assert torch.equal(exchanged, 1000 * ranks + rank)
    shared = torch.tensor([rank])
    comm.broadcast(shared, 63).wait()
    assert shared.item() == 63
    reduced = torch.tensor([1])
    comm.reduce(reduced, 5).wait()
    assert reduced.item() == (N if rank == 5 else 1)
    comm.scatter(scattered, ranks * 2 if rank == 7 else None, 7).wait()
    assert scattered.item() == 2 * rank
    comm.gather(gathered if rank == 9 else None, mine * 3, 9).wait()
    assert rank != 9 or torch.equal(gathered, ranks * 3)
    came = torch.empty(1, dtype=torch.int64)
    comm.exchange([Recv(came, (rank - 1) % N), Send(mine, (rank + 1) % N)]).wait()
    assert came.item() == (rank - 1) % N
    comm.barrier()
    half = comm.split(rank % 2)
    assert half is not None
    assert (half.size, half.rank) == (N // 2, rank // 2)


def reduce_by_messages(comm: Communicator) -> None:
    for reduce in (algorithms.halving_doubling_all_reduce, algorithms.double_tree_all_reduce):
        tensor = torch.full((N,), comm.rank)
        reduce(comm, tensor)
        assert tensor.tolist() == [N * (N - 1) // 2] * N


def test_sixty_four_ranks_do_every_collective_in_seconds() -> None:
    world = LocalWorld(N)

    start = time.process_time()
    world.run(call_everything)
    world.run(reduce_by_messages)

    assert time.process_time() - start < 5.0
