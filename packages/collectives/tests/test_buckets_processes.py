"""What peers got wrong, between processes connected by Gloo and between threads; DDP as the oracle.

Two processes run all the sections below one after the other, and a test asks for each whether it
was finished.
"""

import time

import pytest
import torch
import torch._dynamo  # which DDP needs: once, before ranks are forked
from torch import nn

from trainwright.collectives import (
    BufferInFlightError,
    LocalWorld,
    NotAvailableError,
    ReduceOp,
    SharedMemoryCommunicator,
    TorchCommunicator,
    Watched,
    differentiable,
)
from trainwright.collectives.buckets import GradientBuckets, UnusedParameterError
from trainwright.collectives.codec import BlockInt8, compressed_all_reduce
from trainwright.collectives.testing import run_processes

AVG = ReduceOp.AVG


def a_gather_delivers_elements_in_the_order_that_is_seen(comm):
    turned = (torch.arange(10) + 100 * comm.rank).reshape(2, 5).T
    assert not turned.is_contiguous()
    gathered = torch.empty(5 * comm.size, 2, dtype=torch.int64) if comm.rank == 1 else None

    comm.gather(gathered, turned, 1).wait()

    if gathered is not None:
        seen = torch.tensor([[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]])
        assert torch.equal(gathered, torch.cat([seen + 100 * rank for rank in range(comm.size)]))


def every_operation_reads_and_writes_elements_in_the_order_that_is_seen(comm):
    rank, size = comm.rank, comm.size
    parts = [(torch.arange(12) + 100 * r).reshape(2, 3, 2).permute(2, 1, 0) for r in range(size)]
    mine, whole = parts[rank], torch.cat(parts)

    def blank(like):  # strided as well
        return torch.empty_like(like.movedim(0, -1), memory_format=torch.contiguous_format).movedim(
            -1, 0
        )

    gathered, part, scattered, summed = blank(whole), blank(mine), blank(mine), blank(mine)
    came = blank(whole)
    comm.all_gather(gathered, mine).wait()
    comm.scatter(
        part, whole.movedim(1, 2).contiguous().movedim(2, 1) if rank == 0 else None, 0
    ).wait()
    comm.reduce_scatter(scattered, gathered).wait()
    comm.all_to_all(came, gathered).wait()
    comm.all_reduce(summed.copy_(mine)).wait()

    assert torch.equal(gathered, whole)
    assert torch.equal(part, mine)
    assert torch.equal(scattered, mine * size)
    assert torch.equal(came, torch.cat([mine] * size))
    assert torch.equal(summed, sum(parts))


def the_source_of_a_broadcast_in_a_part_of_the_ranks_gets_all_gradients(comm):
    part = comm.split(0 if comm.rank else None)
    if part is not None:
        x = torch.ones(3, requires_grad=True)
        differentiable.broadcast(x, part, root=0).sum().backward()
        expected = [float(part.size)] * 3 if part.rank == 0 else [0.0] * 3
        assert x.grad.tolist() == expected


def averages_of_float16_are_exact_at_both_ends(comm):
    for values in ([30000.0], [2.0**-24], [30000.0, 2.0**-24], [65504.0, -(2.0**-24)]):
        start = torch.tensor(values, dtype=torch.float16)
        summed, reduced, part = start.clone(), start.clone(), torch.empty_like(start)
        comm.all_reduce(summed, AVG).wait()
        comm.reduce(reduced, 0, AVG).wait()
        comm.reduce_scatter(part, start.repeat(comm.size), AVG).wait()
        assert summed.tolist() == reduced.tolist() == part.tolist() == values


def scalars(*names):
    return {name: nn.Parameter(torch.tensor(0.0)) for name in names}


def gradients_of_earlier_backwards_and_of_unused_parameters_are_reduced_or_refused(comm):
    p = scalars("a", "b")
    buckets = GradientBuckets(p.items(), comm)
    with buckets.accumulate():
        ((comm.rank + 1) * p["a"]).backward()
    ((comm.rank + 1) * p["b"]).backward()
    buckets.finish()
    assert [p["a"].grad.item(), p["b"].grad.item()] == [1.5, 1.5]

    p["a"].grad = p["b"].grad = None
    ((comm.rank + 1) * p["a"]).backward()
    with pytest.raises(UnusedParameterError, match="for b "):
        buckets.finish()
    assert p["a"].grad is None


def buckets_may_be_rebuilt_while_gradients_accumulate(comm):
    p = scalars("a", "b")
    buckets = GradientBuckets(p.items(), comm, bucket_bytes=4)
    for _ in range(2):
        for value in (1.0, 2.0, 4.0):
            with buckets.accumulate():
                (value * (p["a"] + p["b"])).backward()
            buckets.rebuild(buckets.plan.names[::-1])
        buckets.finish()
        for q in p.values():
            assert q.grad.item() == 7.0
            q.grad = None


class LateCommunicator:
    def __init__(self, comm):
        self.rank, self.size, self.device, self.name = comm.rank, comm.size, comm.device, comm.name
        self._comm = comm
        self._count = 0

    def all_reduce(self, tensor, *args, **options):
        self._count += 1
        if self._count % 2 == self.rank:
            time.sleep(0.0005)
        return self._comm.all_reduce(tensor, *args, **options)


def an_average_under_way_is_guarded_until_it_is_waited_for(comm):
    with Watched(LateCommunicator(comm)) as watched:
        for _ in range(200):
            buffer = torch.tensor([2.0 * (comm.rank + 1)])
            work = watched.all_reduce(buffer, AVG)
            with pytest.raises(BufferInFlightError):
                buffer.div_(2)
            work.wait()
            assert buffer.item() == 3.0


def compressed_sums_have_the_bits_of_threads(comm):
    def add(part):
        generator = torch.Generator().manual_seed(part.rank)
        tensor = torch.randn(1001, generator=generator)
        compressed_all_reduce(part, tensor, BlockInt8(16)).wait()
        return tensor

    assert torch.equal(add(comm), LocalWorld(comm.size).run(add)[0])


def buckets_live_in_shared_memory(comm):
    try:
        shared = SharedMemoryCommunicator()
    except NotAvailableError:
        return
    gradients_of_earlier_backwards_and_of_unused_parameters_are_reduced_or_refused(shared)
    buckets_may_be_rebuilt_while_gradients_accumulate(shared)
    p = {"a": nn.Parameter(torch.zeros(1000))}
    buckets = GradientBuckets(p.items(), shared)
    (p["a"] * (comm.rank + 1)).sum().backward()
    buckets.finish()
    assert p["a"].grad.eq(1.5).all()


EVERYWHERE = (
    a_gather_delivers_elements_in_the_order_that_is_seen,
    every_operation_reads_and_writes_elements_in_the_order_that_is_seen,
    the_source_of_a_broadcast_in_a_part_of_the_ranks_gets_all_gradients,
    averages_of_float16_are_exact_at_both_ends,
    gradients_of_earlier_backwards_and_of_unused_parameters_are_reduced_or_refused,
    buckets_may_be_rebuilt_while_gradients_accumulate,
    an_average_under_way_is_guarded_until_it_is_waited_for,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens):
        x = self.table(tokens)
        x = self.norm(x + torch.tanh(self.body(torch.tanh(self.body(x)))))
        return (x @ self.table.weight.T).logsumexp(-1).mean()


def gradients_are_those_of_ddp(comm):
    tokens = torch.randint(11, (3, 2, 4, 5), generator=torch.Generator().manual_seed(comm.rank))
    found = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = Model()
        if is_ours:
            run = model
            buckets = GradientBuckets(model, comm, bucket_bytes=400)
            quiet = buckets.accumulate
        else:
            run = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0004)
            quiet = run.no_sync
        steps = []
        for first, second in tokens:
            with quiet():
                run(first).backward()
            run(second).backward()
            if is_ours:
                buckets.finish()
            steps.append([p.grad.clone() for p in model.parameters()])
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad)
                    p.grad = None
        found.append(steps)
    for ours, theirs in zip(*found, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            # DDP divides before it adds; three steps at a learning rate of one carry that on.
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


SECTIONS = (
    *EVERYWHERE,
    buckets_live_in_shared_memory,
    compressed_sums_have_the_bits_of_threads,
    gradients_are_those_of_ddp,
)


def run_sections(comm: TorchCommunicator) -> list[str]:
    finished = []
    for section in SECTIONS:
        section(comm)
        finished.append(section.__name__)
    return finished


@pytest.fixture(scope="module")
def kept() -> list[list[str]]:
    return run_processes(run_sections, 2, timeout_s=100.0)


@pytest.mark.processes
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_between_two_processes(kept, section):
    assert all(section.__name__ in finished for finished in kept)


@pytest.mark.parametrize("section", EVERYWHERE, ids=lambda section: section.__name__)
def test_between_two_threads(section):
    LocalWorld(2).run(section)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("section", EVERYWHERE[:4], ids=lambda section: section.__name__)
def test_between_more_threads(section, size):
    LocalWorld(size).run(section)
