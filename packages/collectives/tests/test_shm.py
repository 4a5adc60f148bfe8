"""The communicator over shared memory, between real processes of this host.

Starting processes is slow, so three of them run all the sections below one after the other, and a
test asks for each whether it was finished. What one process can show, threads show.
"""

import itertools
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo  # which DDP and optimizers need: once, before ranks are forked
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainwright.collectives import (
    CollectiveTimeoutError,
    LocalWorld,
    PeerFailedError,
    Recv,
    ReduceOp,
    Send,
    TorchCommunicator,
    UsageError,
)
from trainwright.collectives.shm import (
    NotAvailableError,
    SharedMemoryCommunicator,
    quick,
    register_backend,
    transit,
)
from trainwright.collectives.testing import (
    COMMUNICATOR_LAWS,
    LAWS_ABOUT_SHAPES,
    Case,
    contribution,
    run_processes,
    some_cases,
)

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"),
    reason="shared memory between processes needs Linux on x86-64 or aarch64",
)

# Large enough to pass in pieces, not divisible by the number of ranks.
LARGE = [Case((70_001,), torch.float32, root=1), Case((140_003, 1), torch.bfloat16, root=2)]


@pytest.fixture(scope="module")
def kept() -> list[list[str]]:
    """Run all sections in three processes; return the names of those that each has finished."""
    return run_processes(run_sections, 3, timeout_s=100.0)


def run_sections(world: TorchCommunicator) -> list[str]:
    finished = []
    comm = SharedMemoryCommunicator(timeout_s=30.0)
    for section in SECTIONS:
        section(comm)
        finished.append(section.__name__)
    return finished


def the_laws_hold(comm: SharedMemoryCommunicator, step: int = 24) -> None:
    for number, law in enumerate(COMMUNICATOR_LAWS):
        some = some_cases()[number % step :: step]
        for case in [*some, LARGE[number % 2]] if law in LAWS_ABOUT_SHAPES else some[:1]:
            try:
                law(comm, case)
            except Exception as error:
                error.add_note(f"{law.__name__}, {case}, {comm}")
                raise


def the_laws_hold_in_a_part(comm: SharedMemoryCommunicator) -> None:
    part = comm.split(0 if comm.rank != 1 else 1, key=-comm.rank)
    assert part is not None
    assert part.size == (1 if comm.rank == 1 else 2)
    the_laws_hold(part, step=48)


def tensors_may_live_in_shared_memory_on_some_ranks(comm: SharedMemoryCommunicator) -> None:
    # Nobody, one, two or all of the ranks have theirs there; the bits are those of threads.
    # Pieces are made small, so that their slots are used several times.
    cases = (
        Case((4_001,)),
        Case((20_001,), torch.float32, root=1),
        Case((40_003, 1), torch.bfloat16, root=2),
        Case((50_000,), torch.float16, op=ReduceOp.AVG),
    )
    expected = [LocalWorld(comm.size).run(combine_and_gather, case)[comm.rank] for case in cases]
    everywhere = list(itertools.product((False, True), repeat=comm.size))
    for number, residents in enumerate([*everywhere, everywhere[-1]]):
        case = cases[number % len(cases)]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transit, "_MAX_PIECE_BYTES", 1 << 13)
            patch.setattr(transit, "_GRAIN", 1 << 6)
            patch.setattr(quick, "_MAX_READ_BYTES", 0)
            made = combine_and_gather(comm.split(0), case, residents[comm.rank])

        for mine, theirs in zip(made, expected[number % len(cases)], strict=True):
            assert torch.equal(mine, theirs), (case, residents)


def combine_and_gather(comm, case: Case, is_resident: bool = False) -> list[torch.Tensor]:
    def place(tensor: torch.Tensor) -> torch.Tensor:
        return comm.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) if is_resident else tensor

    def start() -> torch.Tensor:
        whole = contribution(case, comm.rank, (comm.size * case.shape[0], *case.shape[1:]))
        return place((whole.double() * 1.1).to(case.dtype))

    whole, gathered, shared, apart = start(), start(), start(), start()
    own = gathered[comm.rank * case.shape[0] : (comm.rank + 1) * case.shape[0]]
    reduced = torch.empty_like(own)
    exchanged = torch.empty_like(apart)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    came = place(torch.empty_like(apart))
    comm.exchange([Send(apart, after), Recv(came, before)]).wait()
    comm.all_reduce(whole, case.op).wait()
    comm.reduce_scatter(reduced, gathered, case.op).wait()
    comm.all_gather(gathered, own).wait()
    comm.broadcast(shared, case.root % comm.size).wait()
    comm.all_to_all(exchanged, apart).wait()
    return [whole, reduced, gathered, shared, exchanged, came]


def groups_do_not_wait_for_each_other(comm: SharedMemoryCommunicator) -> None:
    # Ranks start and end operations of two groups in opposite orders.
    twin = comm.split(0)
    assert twin is not None
    groups = [comm, twin] if comm.rank % 2 else [twin, comm]
    for first, second in (groups, groups[::-1]):
        tensors = [comm.empty((100_000,)).fill_(1.0 + comm.rank) for _ in range(2)]
        works = [first.all_reduce(tensors[0]), second.all_reduce(tensors[1])]
        for work in reversed(works):
            work.wait(20.0)
        for tensor in tensors:
            assert set(tensor.tolist()) == {6.0}


def any_number_of_operations_may_be_under_way(comm: SharedMemoryCommunicator) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    tensors = [torch.full((3,), float(number)) for number in range(150)]
    came = torch.empty(150)
    works = [comm.all_reduce(tensor) for tensor in tensors]
    works += [comm.send(torch.tensor([1.0 * tag]), after, tag) for tag in range(150)]
    works += [comm.recv(came[tag : tag + 1], before, tag) for tag in reversed(range(150))]
    for work in works if comm.rank else reversed(works):
        work.wait()
    assert [tensor[2].item() for tensor in tensors] == [3.0 * n for n in range(150)]
    assert came.tolist() == [float(number) for number in range(150)]


def answers_stay_until_they_are_collected(comm: SharedMemoryCommunicator) -> None:
    ranks = sum(range(comm.size))
    with torch.inference_mode():
        comm.all_reduce(torch.ones(70_000)).wait()
    for turn in range(120):
        tensors = [torch.full((70_000,), float(turn + n + comm.rank)) for n in range(4)]
        # The others may have ended the first when this rank makes room for the last.
        works = [comm.all_reduce(tensor) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        for n, tensor in enumerate(tensors):
            assert bool((tensor == float((turn + n) * comm.size + ranks)).all())


def a_rank_that_computes_holds_nobody_up(comm: SharedMemoryCommunicator) -> None:
    tensor = torch.full((500_000,), 1.0 + comm.rank)
    comm.barrier()
    if comm.rank > 0:
        time.sleep(0.2)
    work = comm.all_reduce(tensor)
    start = time.monotonic()
    if comm.rank == 0:
        time.sleep(2.0)
    work.wait()
    seconds = time.monotonic() - start
    assert set(tensor.tolist()) == {6.0}
    assert comm.rank == 0 or seconds < 1.2
    comm.barrier()


def different_calls_raise_on_every_rank_alike(comm: SharedMemoryCommunicator) -> None:
    tensor = torch.ones(5 if comm.rank == 2 else 3)
    with pytest.raises(UsageError, match=r"rank 2 called all_reduce\(float32, 5 elements") as one:
        comm.all_reduce(tensor).wait()
    assert "rank 0 called all_reduce(float32, 3 elements, SUM)" in str(one.value)
    if comm.rank == 1:
        work = comm.broadcast(torch.ones(4), 0)
    else:
        work = comm.all_reduce(torch.ones(400_000))
    with pytest.raises(UsageError, match=r"rank 1 called broadcast\(float32, 4 elements, root=0"):
        work.wait()
    outputs = [2 if comm.rank == 1 else 1] * comm.size
    with pytest.raises(UsageError, match=r"sends 1 rows to rank 1, which expects 2"):
        comm.all_to_all(torch.ones(sum(outputs)), torch.ones(3), outputs, [1] * 3).wait()
    if comm.rank == 0:
        comm.send(torch.ones(2), 1, 4).wait()
    if comm.rank == 1:
        with pytest.raises(UsageError, match="sends another shape or dtype than"):
            comm.recv(torch.ones(3), 0, 4).wait()
    comm.all_reduce(tensor[:3]).wait()
    assert tensor.tolist()[:3] == [3.0] * 3


def memory_is_used_again(comm: SharedMemoryCommunicator) -> None:
    tensor = torch.ones(200_000)
    small = torch.ones(5)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    places = set()
    for _ in range(40):
        comm.all_reduce(tensor).wait()
        comm.all_reduce(small).wait()
        comm.exchange([Send(tensor, after), Recv(torch.empty(200_000), before)]).wait()
        resident = comm.empty((300_000,))
        comm.all_reduce(resident).wait()
        places.add(resident.data_ptr())
        del resident
    assert len(places) <= 2
    assert comm.empty((0, 3)).shape == (0, 3)


def failing(fn: Callable[[], object], error_type: type[Exception]) -> tuple[Exception, float]:
    start = time.monotonic()
    with pytest.raises(error_type) as caught:
        fn()
    return caught.value, time.monotonic() - start


def a_rank_that_gives_up_wakes_the_others(world: SharedMemoryCommunicator) -> None:
    comm = SharedMemoryCommunicator(timeout_s=30.0)
    half = comm.split(0)
    if comm.rank == 1:
        time.sleep(0.05)
        half.abort(ValueError("no more data"))
        return
    error, seconds = failing(comm.barrier, PeerFailedError)
    assert (error.rank, error.cause) == (1, "ValueError: no more data")
    assert seconds < 5.0
    failing(comm.barrier, PeerFailedError)


def a_timeout_names_exactly_the_missing(world: SharedMemoryCommunicator) -> None:
    comm = SharedMemoryCommunicator()
    tensor = torch.ones(3)
    comm.all_reduce(tensor).wait()
    if comm.rank == 1:
        world.barrier()
        late, _ = failing(lambda: comm.all_reduce(tensor).wait(), CollectiveTimeoutError)
    else:
        late, seconds = failing(lambda: comm.all_reduce(tensor).wait(0.3), CollectiveTimeoutError)
        assert seconds < 5.0
        world.barrier()
    assert "collective 1, all_reduce(float32[3], SUM), in" in str(late)
    assert "missing: rank 1." in str(late)
    assert "collectives started by each rank: [2, 1, 2], finished: [1, 1, 1]" in str(late)


def a_process_that_is_killed_is_named_at_once(world: SharedMemoryCommunicator) -> None:
    if world.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            child = os.fork()
            if child == 0:
                die_in_the_second_round(folder)
            comm = meet(folder, 0)
            comm.all_reduce(torch.ones(3)).wait()
            large = comm.empty((300_000,)).zero_()
            error, seconds = failing(lambda: comm.all_reduce(large).wait(), PeerFailedError)
            os.waitpid(child, 0)
        assert error.rank == 1
        assert "its process has ended during collective 1, all_reduce" in error.cause
        assert seconds < 5.0
    world.barrier()
    assert not any(path.name.startswith("trainwright") for path in Path("/dev/shm").iterdir())


def meet(folder: str, rank: int) -> SharedMemoryCommunicator:
    store = dist.FileStore(f"{folder}/store", 2)
    return SharedMemoryCommunicator.from_store(store, rank, 2, timeout_s=30.0)


def die_in_the_second_round(folder: str) -> None:
    try:
        comm = meet(folder, 1)
        comm.all_reduce(torch.ones(3)).wait()
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)


def failures_name_ranks_of_the_world(world: SharedMemoryCommunicator) -> None:
    group = dist.new_group([1, 2])
    if world.rank > 0:
        comm = SharedMemoryCommunicator(group, timeout_s=30.0)
        assert comm.rank == world.rank - 1
        with pytest.raises(UsageError, match=r"rank 1 \(world rank 2\) called broadcast"):
            (comm.broadcast if comm.rank else comm.reduce)(torch.ones(2), 0).wait()
        if comm.rank == 1:
            comm.abort("tired")
        else:
            error, _ = failing(comm.barrier, PeerFailedError)
            assert (error.rank, error.cause) == (2, "tired")
    world.barrier()


def failures_have_not_harmed_other_communicators(world: SharedMemoryCommunicator) -> None:
    tensor = torch.ones(1)
    world.all_reduce(tensor).wait()
    assert tensor.item() == 3


def torch_knows_it_as_a_back_end(world: SharedMemoryCommunicator) -> None:
    register_backend()
    register_backend()
    group = dist.new_group(backend="shm")
    rank, size = world.rank, world.size
    total = torch.ones(3, requires_grad=True)
    dist.all_reduce(total, group=group)
    parts = [torch.empty(2, 2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2, 2), float(rank)), group=group)
    kept = torch.empty(2)
    dist.reduce_scatter(kept, [torch.full((2,), float(r)) for r in range(size)], group=group)
    averaged = torch.empty(1)
    dist.reduce_scatter_tensor(averaged, torch.arange(3.0) + rank, dist.ReduceOp.AVG, group)
    bits = torch.tensor([1 << rank])
    dist.reduce(bits, 1, dist.ReduceOp.BOR, group)
    turned = [torch.empty(r + 1) for r in range(size)]
    dist.all_to_all(turned, [torch.full((rank + 1,), float(r)) for r in range(size)], group=group)
    table = torch.empty(size)
    dist.all_to_all_single(table, torch.arange(3.0) + 10 * rank, group=group)
    gathered = [torch.empty(1) for _ in range(size)] if rank == 1 else None
    dist.gather(torch.tensor([float(rank)]), gathered, 1, group=group)
    given = [torch.tensor([5.0 + r]) for r in range(size)] if rank == 2 else None
    taken = torch.empty(())
    dist.scatter(taken, given and [part[0] for part in given], 2, group=group)
    came = torch.empty(1)
    after, before = (rank + 1) % size, (rank - 1) % size
    asked = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), after, group),
        dist.P2POp(dist.irecv, came, before, group),
    ]
    for work in dist.batch_isend_irecv(asked):
        work.wait()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    dist.barrier(group)

    assert total.tolist() == [3.0] * 3
    assert [part[1, 1].item() for part in parts] == [0.0, 1.0, 2.0]
    assert kept.tolist() == [3.0 * rank] * 2
    assert averaged.item() == rank + 1.0
    assert rank != 1 or bits.item() == 7
    assert [part.tolist() for part in turned] == [[float(rank)] * (r + 1) for r in range(size)]
    assert table.tolist() == [10.0 * r + rank for r in range(size)]
    assert gathered is None or [part.item() for part in gathered] == [0.0, 1.0, 2.0]
    assert taken.item() == 5.0 + rank
    assert came.item() == before
    assert objects == [{"rank": r} for r in range(size)]
    with pytest.raises(UsageError, match="there are SUM, AVG"):
        dist.all_reduce(total, dist._make_nccl_premul_sum(2.0), group)
    with pytest.raises(UsageError, match="'gloo' is another back end"):
        register_backend("gloo")
    with pytest.raises(UsageError, match="in lower case, got 'SHM'"):
        register_backend("SHM")


def torch_trains_over_it(world: SharedMemoryCommunicator) -> None:
    group = dist.new_group(backend="shm")
    inputs = [
        torch.randn(4, 6, generator=torch.Generator().manual_seed(r)) for r in range(world.size)
    ]
    serial = make_model()
    train(serial, lambda: sum(serial(x).square().mean() for x in inputs) / world.size)

    replicated = DistributedDataParallel(make_model(), process_group=group)
    train(replicated, lambda: replicated(inputs[world.rank]).square().mean())
    sharded = make_model()
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    for part in (sharded[0], sharded):
        fully_shard(part, mesh=mesh)
    train(sharded, lambda: sharded(inputs[world.rank]).square().mean())

    for plain, whole, part in zip(
        serial.parameters(), replicated.parameters(), sharded.parameters(), strict=True
    ):
        torch.testing.assert_close(whole, plain)
        torch.testing.assert_close(part.full_tensor(), plain)


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


def train(model: torch.nn.Module, compute_loss: Callable[[], torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        compute_loss().backward()
        optimizer.step()
        optimizer.zero_grad()


SECTIONS = (
    the_laws_hold,
    the_laws_hold_in_a_part,
    tensors_may_live_in_shared_memory_on_some_ranks,
    groups_do_not_wait_for_each_other,
    any_number_of_operations_may_be_under_way,
    answers_stay_until_they_are_collected,
    a_rank_that_computes_holds_nobody_up,
    different_calls_raise_on_every_rank_alike,
    memory_is_used_again,
    a_rank_that_gives_up_wakes_the_others,
    a_timeout_names_exactly_the_missing,
    a_process_that_is_killed_is_named_at_once,
    failures_name_ranks_of_the_world,
    failures_have_not_harmed_other_communicators,
    torch_knows_it_as_a_back_end,
    torch_trains_over_it,
)


@pytest.mark.processes
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_between_three_processes(kept: list[list[str]], section: Callable[..., None]) -> None:
    assert all(section.__name__ in finished for finished in kept)


def run_threads(size: int, fn: Callable[[int], object]) -> list[object]:
    results: list[object] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = fn(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return results


def test_a_rank_that_never_comes_is_named() -> None:
    store = dist.HashStore()

    error, _ = failing(
        lambda: SharedMemoryCommunicator.from_store(store, 0, 2, timeout_s=0.2),
        CollectiveTimeoutError,
    )

    assert "missing: [1]" in str(error)


def test_ranks_of_different_hosts_are_refused_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    hosts = iter(["one", "two"])
    monkeypatch.setattr("trainwright.collectives.shm.meeting.host_identity", lambda: next(hosts))

    errors = run_threads(
        2, lambda rank: SharedMemoryCommunicator.from_store(store, rank, 2, timeout_s=20.0)
    )

    assert all(isinstance(error, NotAvailableError) for error in errors), errors
    assert all("use TorchCommunicator between hosts" in str(error) for error in errors)


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")

    with pytest.raises(NotAvailableError, match="this is linux on riscv64; use TorchCommunicator"):
        SharedMemoryCommunicator.from_store(dist.HashStore(), 0, 1)


def test_mistakes_are_refused_before_anything_is_made() -> None:
    with pytest.raises(UsageError, match=r"rank=2 must be one of 0\.\.1"):
        SharedMemoryCommunicator.from_store(dist.HashStore(), 2, 2)
    with pytest.raises(UsageError, match="timeout_s=0 must be positive"):
        SharedMemoryCommunicator.from_store(dist.HashStore(), 0, 1, timeout_s=0)
    with pytest.raises(UsageError, match="is not initialized"):
        SharedMemoryCommunicator()
    alone = SharedMemoryCommunicator.from_store(dist.HashStore(), 0, 1)
    with pytest.raises(UsageError, match="negative length"):
        alone.empty((2, -1))


def test_a_communicator_of_one_needs_nobody() -> None:
    comm = SharedMemoryCommunicator.from_store(dist.HashStore(), 0, 1)
    tensor = comm.empty((3,)).fill_(2.0)

    comm.all_reduce(tensor).wait()
    part = comm.split(5)

    assert part is not None
    assert part.empty((2,)).shape == (2,)
    assert comm.split(None) is None
    assert tensor.tolist() == [2.0] * 3
