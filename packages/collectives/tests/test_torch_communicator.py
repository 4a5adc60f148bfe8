"""The communicator over torch.distributed, between real processes that are connected by Gloo.

Starting processes is slow, so four of them run all the sections below one after the other, and a
test asks for each whether it was finished.
"""

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from trainwright.collectives import (
    CollectiveTimeoutError,
    Communicator,
    LocalWorld,
    PeerFailedError,
    ReduceOp,
    TorchCommunicator,
    UsageError,
    Work,
)
from trainwright.collectives.background import all_of
from trainwright.collectives.checked import CheckedCommunicator
from trainwright.collectives.failures import Failure, FailureBoard
from trainwright.collectives.gloo_backend import GlooBackend
from trainwright.collectives.gloo_watch import CallWatch
from trainwright.collectives.native_backend import NativeBackend
from trainwright.collectives.objects import all_gather_object
from trainwright.collectives.rendezvous import nest
from trainwright.collectives.testing import (
    COMMUNICATOR_LAWS,
    LAWS_ABOUT_SHAPES,
    Case,
    contribution,
    run_processes,
    some_cases,
)

pytestmark = pytest.mark.processes

# Large enough for the algorithms of two rounds; not divisible by the number of ranks.
LARGE = [Case((35_001,), torch.float32, root=1), Case((66_003, 1), torch.bfloat16, root=2)]

# Gloo's own operations add in another order each, and cancel messages whose handle is dropped.
NOT_OF_NATIVE_GLOO = {
    "all_reduce_is_reduce_then_broadcast",
    "reduce_scatter_is_reduce_then_scatter",
    "all_reduce_is_reduce_scatter_then_all_gather",
    "sums_are_in_rank_order_whoever_comes_first",
    "works_may_be_forgotten",
    "works_tell_whether_they_are_done",
    "splits_order_their_ranks_by_key",
}


@pytest.fixture(scope="module")
def kept() -> list[list[str]]:
    """Run all sections in four processes; return the names of those that each has finished."""
    return run_processes(run_sections, 4, timeout_s=150.0)


def run_sections(comm: TorchCommunicator) -> list[str]:
    finished = []
    for section in SECTIONS:
        section(comm)
        finished.append(section.__name__)
    return finished


def the_laws_hold(comm: TorchCommunicator, step: int = 6) -> None:
    for number, law in enumerate(COMMUNICATOR_LAWS):
        some = some_cases()[number % step :: step]
        for case in [*some, *LARGE] if law in LAWS_ABOUT_SHAPES else some[:2]:
            try:
                law(comm, case)
            except Exception as error:
                error.add_note(f"{law.__name__}, {case}, {comm}")
                raise


def groups_of_torch_are_accepted(comm: TorchCommunicator) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(UsageError, match=r"mesh\.get_group\('dp'\)"):
        TorchCommunicator(mesh)
    row = TorchCommunicator(mesh["tp"])
    column = TorchCommunicator(mesh.get_group("dp"))

    for part in (row, column):
        tensor = torch.tensor([10.0 ** (comm.rank)])
        part.all_reduce(tensor).wait()
        members = [0, 1, 2, 3]
        near = [r for r in members if r // 2 == comm.rank // 2]
        far = [r for r in members if r % 2 == comm.rank % 2]
        assert tensor.item() == sum(10.0**r for r in (near if part is row else far))

    # A leader is chosen and named by ranks of the group.
    shared = torch.tensor([float(comm.rank * 10)])
    row.broadcast(shared, 0).wait()
    assert shared.item() == (0.0 if comm.rank < 2 else 20.0)


def strangers_are_turned_away(comm: TorchCommunicator) -> None:
    group = dist.new_group([2, 3])
    if comm.rank < 2:
        with pytest.raises(UsageError, match=rf"global rank {comm.rank} .*\[2, 3\]"):
            TorchCommunicator(group)
    else:
        assert TorchCommunicator(group).size == 2
    with pytest.raises(UsageError, match="expected a ProcessGroup"):
        TorchCommunicator("world")
    with pytest.raises(UsageError, match="no backend for cuda"):
        TorchCommunicator(device="cuda:0")


def strided_views_leave_their_neighbours_alone(comm: TorchCommunicator) -> None:
    base = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (comm.rank + 1)
    column = base[:, 0]
    comm.all_reduce(column).wait()
    assert base.tolist() == [[10.0, 2.0 * (comm.rank + 1)], [30.0, 4.0 * (comm.rank + 1)]]

    pair = comm.split(comm.rank // 2)
    assert pair is not None
    base = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (pair.rank + 1)
    before = base.clone()
    pair.reduce(base[:, 0], 0).wait()
    assert base.tolist() == ([[3, 2], [9, 4]] if pair.rank == 0 else before.tolist())
    base.copy_(before)
    pair.broadcast(base[:, 0], 0).wait()
    assert base.tolist() == ([[1, 2], [3, 4]] if pair.rank == 0 else [[1, 4], [3, 8]])

    turned = (torch.arange(10) + 100 * comm.rank).reshape(2, 5).T
    gathered = torch.empty(5 * comm.size, 2, dtype=torch.int64) if comm.rank == 1 else None
    comm.gather(gathered, turned, 1).wait()
    if gathered is not None:
        assert gathered[5:7].tolist() == [[100, 105], [101, 106]]


def sums_have_the_bits_of_threads(comm: TorchCommunicator) -> None:
    for case in (Case((7,)), Case((100_003,)), Case((100_003,), torch.bfloat16, op=ReduceOp.AVG)):
        given = [
            (contribution(case, rank).double() * 1.1).to(case.dtype) for rank in range(comm.size)
        ]

        def add(part, case=case, given=given):
            tensor = given[part.rank].clone()
            part.all_reduce(tensor, case.op).wait()
            return tensor

        assert torch.equal(add(comm), LocalWorld(comm.size).run(add)[0])


def groups_do_not_wait_for_each_other(comm: TorchCommunicator) -> None:
    # Ranks start and end operations of two groups in opposite orders.
    twin = comm.split(0)
    assert twin is not None
    groups = [comm, twin] if comm.rank % 2 else [twin, comm]
    for first, second in (groups, groups[::-1]):
        tensors = [torch.full((100_000,), 1.0 + comm.rank) for _ in range(2)]
        works = [first.all_reduce(tensors[0]), second.all_reduce(tensors[1])]
        for work in reversed(works):
            work.wait(20.0)
        for tensor in tensors:
            assert set(tensor.tolist()) == {10.0}


def groups_may_be_dropped_as_soon_as_they_are_made(comm: TorchCommunicator) -> None:
    for _ in range(8):
        comm.split(0)
    comm.barrier()


def tags_too_large_for_gloo_are_refused(comm: TorchCommunicator) -> None:
    with pytest.raises(UsageError, match="tag=1048576 must be between 0 and 1048575"):
        comm.send(torch.ones(1), (comm.rank + 1) % comm.size, 1 << 20)


def native_operations_obey_too(comm: TorchCommunicator) -> None:
    # What NCCL runs, on the backend that is here; ranks in an order that the group does not have.
    group = dist.group.WORLD
    for ranks in ([0, 1, 2, 3], [2, 0, 3, 1]):
        board = FailureBoard(nest(group.get_group_store(), f"test{ranks}"), comm.rank)
        native = CheckedCommunicator(
            NativeBackend(group, torch.device("cpu"), ranks, "native", board)
        )
        assert ranks[native.rank] == comm.rank
        for law in COMMUNICATOR_LAWS:
            if law.__name__ in NOT_OF_NATIVE_GLOO:
                continue
            for case in some_cases()[:: 11 if law in LAWS_ABOUT_SHAPES else 40]:
                law(native, case)
        given = torch.arange(8.0) * (native.rank + 1)
        output = torch.empty(2)
        native.reduce_scatter(output, given).wait()
        assert output.tolist() == [20.0 * native.rank, 20.0 * native.rank + 10.0]
        turned = torch.empty(2, dtype=torch.complex64)
        native.reduce_scatter(turned, given * 1j).wait()
        assert turned.tolist() == [1j * value for value in output.tolist()]
        for dtype in (torch.float32, torch.complex64, torch.int16):
            for root in (0, 3):
                own = (torch.arange(6).view(2, 3) + 100 * native.rank).to(dtype)
                gathered = torch.empty(8, 3, dtype=dtype) if native.rank == root else None
                native.gather(gathered, own, root).wait()
                back = torch.empty_like(own)
                native.scatter(back, gathered, root).wait()
                assert torch.equal(back, own)
                if gathered is not None:
                    assert torch.equal(gathered[2:4], own + 100 * (1 - native.rank))
        half = native.split(comm.rank % 2, key=-native.rank)
        assert half is not None
        members = [rank for rank in reversed(ranks) if rank % 2 == comm.rank % 2]
        assert (half.rank, half.size) == (members.index(comm.rank), 2)
        together = torch.empty(2, dtype=torch.int64)
        half.all_gather(together, torch.tensor([comm.rank])).wait()
        assert together.tolist() == members
        with pytest.raises(UsageError, match="not available yet"):
            half.split(0)


def failing(fn: Callable[[], object], error_type: type[Exception]) -> tuple[Exception, float]:
    start = time.monotonic()
    with pytest.raises(error_type) as caught:
        fn()
    return caught.value, time.monotonic() - start


def a_rank_that_gives_up_wakes_the_others(world: TorchCommunicator) -> None:
    comm = TorchCommunicator()
    if comm.rank == 1:
        comm.abort(ValueError("no more data"))
        return
    error, seconds = failing(comm.barrier, PeerFailedError)
    assert error.rank == 1
    assert error.cause == "ValueError: no more data"
    assert seconds < 5.0
    failing(comm.barrier, PeerFailedError)


def a_timeout_names_exactly_the_missing(world: TorchCommunicator) -> None:
    comm = TorchCommunicator()
    tensor = torch.ones(3)
    comm.all_reduce(tensor).wait()
    if comm.rank in (1, 3):
        time.sleep(1.0)
        late, _ = failing(lambda: comm.all_reduce(tensor).wait(), CollectiveTimeoutError)
        assert "missing: rank 1, rank 3." in str(late)
        return
    error, seconds = failing(lambda: comm.all_reduce(tensor, timeout_s=0.5).wait(), TimeoutError)
    assert "collective 1, all_reduce(float32[3], SUM), in" in str(error)
    assert "missing: rank 1, rank 3." in str(error)
    assert "has started 2 collectives of this group and finished 1, " in str(error)
    assert "rank 1 was last heard in collective 0, rank 3 was last heard in collective 0" in str(
        error
    )
    assert seconds < 10.0


def different_calls_never_meet(world: TorchCommunicator) -> None:
    comm = TorchCommunicator()
    tensor = torch.ones(5 if comm.rank == 2 else 3)
    error, _ = failing(lambda: comm.all_reduce(tensor, timeout_s=0.5).wait(), TimeoutError)
    assert "another operation, shape, dtype or order" in str(error)
    assert any(f"all_reduce(float32[{len(tensor)}], SUM)" in note for note in error.__notes__)


class CountingWatch(CallWatch):
    """A watch that knows how often it has looked at a standstill, however busy the machine is."""

    looks = 0

    def look(self) -> None:
        super().look()
        self.looks += any(backend.works for backend in all_of(self._backends))


def watched_pair_of(
    number: int, world: TorchCommunicator
) -> tuple[CheckedCommunicator, CountingWatch]:
    """Make a communicator whose ranks compare their calls much sooner than by default."""
    store = nest(dist.group.WORLD.get_group_store(), f"watched{number}")
    board = FailureBoard(store, world.rank)
    watch = CountingWatch(board, patience_s=0.3, period_s=0.1)
    backend = GlooBackend(store, world.rank, range(4), "some", 20.0, board, watch)
    return CheckedCommunicator(backend), watch


def gather_to_all(comm: Communicator) -> Work:
    return comm.all_gather(torch.empty(4 * comm.size, 2), torch.ones(4, 2))


def add_up(comm: Communicator, shape: int = 8, dtype: torch.dtype = torch.float32) -> Work:
    return comm.all_reduce(torch.ones(shape, dtype=dtype))


def several(*works: Work) -> None:
    for work in works:
        work.wait()


def calls_that_differ_are_told_by_all_within_seconds(world: TorchCommunicator) -> None:
    def differ_in_a_part(comm: Communicator) -> None:
        part = comm.split(0 if comm.rank else 1)
        add_up(part, 3 if comm.rank == 2 else 4).wait() if comm.rank else comm.barrier()

    # What rank 3 does, what the others do, and what all must tell.
    cases = [
        (
            lambda comm: gather_to_all(comm).wait(),
            lambda comm: comm.barrier(),
            ["collective 0 of 'some'", "rank 3 called all_gather(float32[4, 2])", "barrier()"],
        ),
        (
            lambda comm: add_up(comm, 9).wait(),
            lambda comm: add_up(comm).wait(),
            ["rank 3 called all_reduce(float32[9], SUM)", "called all_reduce(float32[8], SUM)"],
        ),
        (
            # Large enough for two rounds.
            lambda comm: add_up(comm, 99_999, torch.float64).wait(),
            lambda comm: add_up(comm, 99_999).wait(),
            ["rank 3 called all_reduce(float64[99999]", "called all_reduce(float32[99999], SUM)"],
        ),
        (
            # All that rank 3 has called before finds something to meet.
            lambda comm: (several(gather_to_all(comm), add_up(comm)), comm.barrier()),
            lambda comm: several(add_up(comm), add_up(comm), gather_to_all(comm)),
            ["collective 2 of", "rank 3 called barrier()", "all_gather(float32[4, 2])"],
        ),
        (differ_in_a_part, differ_in_a_part, ["collective 0 of 'some/0.0'", "rank 2 called"]),
    ]
    for number, (on_three, on_others, expected) in enumerate(cases):
        comm, watch = watched_pair_of(number, world)
        call = on_three if comm.rank == 3 else on_others
        error, _ = failing(lambda comm=comm, call=call: call(comm), UsageError)
        assert watch.looks < 20, (number, watch.looks)
        assert all(part in str(error) for part in expected), error
        told = all_gather_object(world, str(error))
        assert len(set(told)) == 1
        failing(comm.barrier, UsageError)


def calls_alike_are_never_refused_however_late(world: TorchCommunicator) -> None:
    comm, _ = watched_pair_of(-1, world)
    part = comm.split(comm.rank % 2)
    assert part is not None
    works = [add_up(comm), gather_to_all(comm)]
    if comm.rank == 0:
        time.sleep(0.8)
    # Some are stuck in another group than others, and nobody has waited for the works.
    add_up(part, 100_000).wait()
    if comm.rank == 1:
        time.sleep(0.8)
    rows = [comm.rank] * 4
    outputs = torch.empty(sum(range(4)))
    works.append(comm.all_to_all(outputs, torch.ones(sum(rows)), list(range(4)), rows))
    several(*works)
    comm.barrier()
    assert comm._backend.board.read() is None


def parts_of_different_sizes_never_meet(world: TorchCommunicator) -> None:
    # Gloo itself would end the process that gets more than it expects.
    comm = TorchCommunicator()
    outputs = [2 if comm.rank == 1 else 1] * 4
    given = torch.ones(4)
    came = torch.ones(sum(outputs))
    failing(
        lambda: comm.all_to_all(came, given, outputs, [1] * 4, timeout_s=0.5).wait(), TimeoutError
    )


def a_failure_in_a_part_reaches_the_whole(world: TorchCommunicator) -> None:
    comm = TorchCommunicator()
    half = comm.split(comm.rank // 2)
    if comm.rank == 3:
        half.abort("tired")
    else:
        error, _ = failing(comm.barrier, PeerFailedError)
        assert (error.rank, error.cause) == (3, "tired")


def a_failure_whose_connections_woke_nobody_is_found(world: TorchCommunicator) -> None:
    comm = TorchCommunicator()
    if comm.rank == 3:
        comm._backend.board._write(Failure(3, "gone without a word"))
    else:
        error, _ = failing(comm.barrier, PeerFailedError)
        assert (error.rank, error.cause) == (3, "gone without a word")
    world.barrier()  # until then no connection is closed


def a_failure_reaches_those_in_the_second_round(world: TorchCommunicator) -> None:
    comm = TorchCommunicator()
    large = torch.ones(300_000)
    if comm.rank == 0:
        time.sleep(0.5)
        comm.abort("left")
        return
    error, _ = failing(lambda: comm.all_reduce(large).wait(), PeerFailedError)
    assert (error.rank, error.cause) == (0, "left")


def failures_have_not_harmed_other_communicators(world: TorchCommunicator) -> None:
    tensor = torch.ones(1)
    world.all_reduce(tensor).wait()
    assert tensor.item() == 4


def the_laws_hold_in_a_part(comm: TorchCommunicator) -> None:
    half = comm.split(comm.rank % 2)
    the_laws_hold(half, step=20)


SECTIONS = (
    the_laws_hold,
    the_laws_hold_in_a_part,
    groups_of_torch_are_accepted,
    strangers_are_turned_away,
    strided_views_leave_their_neighbours_alone,
    sums_have_the_bits_of_threads,
    groups_do_not_wait_for_each_other,
    groups_may_be_dropped_as_soon_as_they_are_made,
    tags_too_large_for_gloo_are_refused,
    native_operations_obey_too,
    a_rank_that_gives_up_wakes_the_others,
    a_timeout_names_exactly_the_missing,
    different_calls_never_meet,
    calls_that_differ_are_told_by_all_within_seconds,
    calls_alike_are_never_refused_however_late,
    parts_of_different_sizes_never_meet,
    a_failure_in_a_part_reaches_the_whole,
    a_failure_whose_connections_woke_nobody_is_found,
    a_failure_reaches_those_in_the_second_round,
    failures_have_not_harmed_other_communicators,
)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_between_four_processes(kept: list[list[str]], section: Callable[..., None]) -> None:
    assert all(section.__name__ in finished for finished in kept)


def test_a_dead_process_is_noticed_and_reported() -> None:
    start = time.monotonic()
    with pytest.raises(Exception, match="rank 1 ended with exit code 7"):
        run_processes(die, 2, timeout_s=60.0)
    assert time.monotonic() - start < 50.0


def die(comm: TorchCommunicator) -> None:
    if comm.rank == 1:
        os._exit(7)
    error, _ = failing(comm.barrier, PeerFailedError)
    assert error.rank == 1
    assert "connection was lost" in error.cause
    raise error


def test_errors_of_a_process_come_back_as_they_were() -> None:
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        run_processes(divide, 1, 5, timeout_s=60.0)
    assert "on rank 0, whose traceback was" in caught.value.__notes__[0]
    assert "in divide" in caught.value.__notes__[0]


def divide(comm: TorchCommunicator, number: int) -> None:
    assert number == 5
    raise ZeroDivisionError("on purpose")


def test_processes_that_hang_are_ended() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0\] did not finish"):
        run_processes(hang, 1, timeout_s=3.0)


def hang(comm: TorchCommunicator) -> None:
    time.sleep(100.0)
