"""Recorded communicators, objects and deterministic sums between real processes over Gloo.

Starting processes is slow, so four of them run all the sections below one after the other, and a
test asks for each whether it was finished.
"""

import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from numpy import random as random_of_numpy

from trainwright.collectives import (
    CollectiveTimeoutError,
    LocalWorld,
    PeerFailedError,
    ReduceOp,
    TorchCommunicator,
    UsageError,
)
from trainwright.collectives.checked import CheckedCommunicator
from trainwright.collectives.failures import FailureBoard
from trainwright.collectives.native_backend import NativeBackend
from trainwright.collectives.objects import all_gather_object, run_on_root
from trainwright.collectives.recorded import Recorded
from trainwright.collectives.rendezvous import nest
from trainwright.collectives.testing import (
    COMMUNICATOR_LAWS,
    Case,
    contribution,
    run_processes,
    some_cases,
)
from trainwright.collectives.testing.laws_of_messages import works_tell_whether_they_are_done
from trainwright.collectives.testing.laws_of_movement import rows_of_any_number_are_gathered
from trainwright.collectives.testing.laws_of_reductions import LAWS_OF_REDUCTIONS
from trainwright.collectives.uneven import all_gather_uneven

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def kept() -> list[list[str]]:
    """Run all sections in four processes; return the names of those that each has finished."""
    return run_processes(run_sections, 4, timeout_s=120.0)


def run_sections(comm: TorchCommunicator) -> list[str]:
    finished = []
    for section in SECTIONS:
        section(comm)
        finished.append(section.__name__)
    return finished


def the_laws_hold_while_each_operation_is_verified(comm: TorchCommunicator) -> None:
    recorded = Recorded(comm, verify=True)
    laws = [law for law in COMMUNICATOR_LAWS if law is not works_tell_whether_they_are_done]
    for number, law in enumerate(laws):
        case = some_cases()[(7 * number) % 60]
        try:
            law(recorded, case)
        except Exception as error:
            error.add_note(f"{law.__name__}, {case}, {comm}")
            raise
    recorded.check()


def sums_of_any_backend_can_have_the_bits_of_threads(comm: TorchCommunicator) -> None:
    # What NCCL would run, on the backend that is here; ranks in an order of their own as well.
    group = dist.group.WORLD
    for ranks in ([0, 1, 2, 3], [2, 0, 3, 1]):
        board = FailureBoard(nest(group.get_group_store(), f"exact{ranks}"), comm.rank)
        native = CheckedCommunicator(
            NativeBackend(group, torch.device("cpu"), ranks, "native", board, True)
        )
        for number, law in enumerate(LAWS_OF_REDUCTIONS):
            for case in [*some_cases()[number::35], Case((35_001,), torch.bfloat16)]:
                law(native, case)
        for case in some_cases()[::24]:
            rows_of_any_number_are_gathered(native, case)
        given = [contribution(Case((70_001,)), rank) * 1.1 for rank in range(4)]

        def add(part, given=given):
            tensor = given[part.rank].clone()
            part.all_reduce(tensor).wait()
            return tensor

        assert torch.equal(add(native), LocalWorld(4).run(add)[0])
    assert TorchCommunicator(deterministic=True).size == 4


def operations_that_gloo_lacks_are_there(comm: TorchCommunicator) -> None:
    group = dist.group.WORLD
    board = FailureBoard(nest(group.get_group_store(), "lacking"), comm.rank)
    native = CheckedCommunicator(
        NativeBackend(group, torch.device("cpu"), [0, 1, 2, 3], "native", board)
    )
    for part in (comm, native):
        tensor = torch.tensor([1 << comm.rank, 7], dtype=torch.int16)
        part.all_reduce(tensor, ReduceOp.BITWISE_XOR).wait()
        assert tensor.tolist() == [15, 0]
        turned = torch.full((40_000,), 1j)
        part.all_reduce(turned, ReduceOp.PRODUCT).wait()
        assert set(turned.tolist()) == {1 + 0j}


def rows_and_objects_are_gathered(comm: TorchCommunicator) -> None:
    rows = torch.arange(comm.rank * 70_000.0).view(-1, 2)
    whole, counts = all_gather_uneven(comm, rows)
    assert counts == [0, 35_000, 70_000, 105_000]
    assert torch.equal(whole[105_000:], torch.arange(210_000.0).view(-1, 2))

    values = ["", "x" * 10, {"a": list(range(1000))}, None]
    assert all_gather_object(comm, values[comm.rank]) == values
    with pytest.raises(UsageError, match="rank 1 could not encode its value"):
        all_gather_object(comm, (lambda: 1) if comm.rank == 1 else 1)
    part = comm.split(comm.rank // 2)
    assert part is not None
    assert run_on_root(part, lambda: comm.rank * 10) == comm.rank // 2 * 20


def calls_that_differ_raise_on_every_rank_within_seconds(world: TorchCommunicator) -> None:
    comm = Recorded(TorchCommunicator(), verify=True)
    large = torch.ones(400_000)
    comm.all_reduce(large).wait()

    def differ() -> None:
        if comm.rank == 3:
            comm.all_gather(torch.empty(4 * 400_000), large).wait()
        else:
            comm.all_reduce(large).wait()

    start = time.monotonic()
    with pytest.raises(UsageError) as caught:
        differ()
    assert time.monotonic() - start < 5.0
    told = all_gather_object(world, str(caught.value))
    assert len(set(told)) == 1
    assert "rank 3 all_gather #1 (400000,) float32 at test_recorded_processes.py:" in told[0]
    assert "ranks 0-2 all_reduce #1 (400000,) float32 SUM at test_recorded_processes" in told[0]
    comm.barrier()


def those_who_do_not_come_are_named(world: TorchCommunicator) -> None:
    comm = Recorded(TorchCommunicator(), verify=True)
    comm.all_reduce(torch.ones(3)).wait()
    if comm.rank in (1, 3):
        world.barrier()
        with pytest.raises(CollectiveTimeoutError, match=r"missing: rank 1, rank 3\.") as late:
            comm.barrier()
        assert "all_reduce #0 (3,) float32 SUM" in late.value.__notes__[-1]
        return
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        comm.barrier(timeout_s=0.5)
    assert time.monotonic() - start < 5.0
    world.barrier()
    told = str(caught.value)
    assert f"rank {comm.rank} of {comm.name!r} gave up on barrier #1 at test_recorded_pro" in told
    assert "missing: rank 1, rank 3. " in told
    assert "all ranks came to all_reduce #0 (3,) float32 SUM at test_recorded_pro" in told


def messages_that_differ_stop_everybody(world: TorchCommunicator) -> None:
    comm = Recorded(TorchCommunicator(), verify=True)
    if comm.rank == 1:
        with pytest.raises(UsageError, match=r"rank 0 send #0 \(3,\) .*; rank 1 recv #0 \(2,\)"):
            comm.recv(torch.empty(2), 0).wait()
    else:
        sending = comm.send(torch.ones(3), 1) if comm.rank == 0 else None
        with pytest.raises(PeerFailedError, match=r"rank 1 failed: .*rank 0 send #0 \(3,\)"):
            comm.barrier()
        del sending


def other_communicators_are_as_they_were(world: TorchCommunicator) -> None:
    tensor = torch.ones(1)
    world.all_reduce(tensor).wait()
    assert tensor.item() == 4
    alone = world.split(world.rank)
    assert alone is not None
    alone.exchange([]).wait()


def global_random_states_differ_between_ranks(comm: TorchCommunicator) -> None:
    drawn = all_gather_object(comm, (random.random(), random_of_numpy.random()))
    of_python, of_numpy = zip(*drawn, strict=True)
    assert len(set(of_python)) == comm.size
    assert len(set(of_numpy)) == comm.size


SECTIONS = (
    global_random_states_differ_between_ranks,
    the_laws_hold_while_each_operation_is_verified,
    sums_of_any_backend_can_have_the_bits_of_threads,
    operations_that_gloo_lacks_are_there,
    rows_and_objects_are_gathered,
    calls_that_differ_raise_on_every_rank_within_seconds,
    those_who_do_not_come_are_named,
    messages_that_differ_stop_everybody,
    other_communicators_are_as_they_were,
)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_between_four_processes(kept: list[list[str]], section: Callable[..., None]) -> None:
    assert all(section.__name__ in finished for finished in kept)
