"""Gathering what differs in size between ranks: rows, and objects of Python."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import Communicator, LocalWorld, PeerFailedError, Send, UsageError
from trainwright.collectives.objects import all_gather_object, broadcast_object, run_on_root
from trainwright.collectives.recorded import Recorded
from trainwright.collectives.testing import Case, Layout, contribution, lay_out
from trainwright.collectives.uneven import all_gather_uneven


def messages_of_all(size: int, fn: Callable[[Communicator], object]) -> list[str]:
    """Return what the UsageError of each rank says; afterwards the communicator must work."""

    def run(comm: Communicator) -> str:
        with pytest.raises(UsageError) as caught:
            fn(comm)
        tensor = torch.ones(1)
        comm.all_reduce(tensor).wait()
        assert tensor.item() == comm.size
        return str(caught.value)

    return LocalWorld(size).run(run)


def test_ranks_may_have_any_number_of_rows() -> None:
    def gather(comm: Communicator) -> tuple[list[list[int]], list[int]]:
        num_rows = (2, 0, 3)[comm.rank]
        rows = (10 * comm.rank + torch.arange(num_rows)).view(-1, 1).expand(-1, 2)
        whole, counts = all_gather_uneven(comm, rows)
        return whole.tolist(), counts

    expected = [[0, 0], [1, 1], [20, 20], [21, 21], [22, 22]]
    assert LocalWorld(3).run(gather) == [(expected, [2, 0, 3])] * 3


@settings(max_examples=15)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    row=st.lists(st.integers(0, 3), max_size=2),
    dtype=st.sampled_from([torch.float32, torch.bool, torch.bfloat16, torch.complex64]),
    layout=st.sampled_from(Layout),
)
def test_gathered_rows_are_the_rows_of_the_ranks_in_order(
    counts: list[int], row: list[int], dtype: torch.dtype, layout: Layout
) -> None:
    parts = [contribution(Case((count, *row), dtype), rank) for rank, count in enumerate(counts)]

    def gather(comm: Communicator) -> torch.Tensor:
        given, _ = lay_out(parts[comm.rank], layout, comm.device)
        whole, found = all_gather_uneven(comm, given)
        assert found == counts
        return whole

    for whole in LocalWorld(len(counts)).run(gather):
        assert torch.equal(whole, torch.cat(parts))
        assert whole.is_contiguous()


def test_scalars_count_as_one_row() -> None:
    def gather(comm: Communicator) -> list[int]:
        return all_gather_uneven(comm, torch.tensor(comm.rank))[0].tolist()

    assert LocalWorld(3).run(gather) == [[0, 1, 2]] * 3


def test_messages_under_way_are_left_alone() -> None:
    def run(comm: Communicator) -> list[float]:
        came = torch.zeros(2)
        peer = 1 - comm.rank
        receiving = comm.recv(came, peer)
        all_gather_uneven(comm, torch.zeros(comm.rank + 2))
        comm.exchange([Send(torch.ones(2), peer)]).wait()
        receiving.wait()
        return came.tolist()

    assert LocalWorld(2).run(run) == [[1.0, 1.0]] * 2


def test_rows_that_differ_are_told_on_every_rank() -> None:
    by_shape = messages_of_all(
        3, lambda comm: all_gather_uneven(comm, torch.ones(1, 3 if comm.rank == 1 else 2))
    )
    by_dtype = messages_of_all(
        3, lambda comm: all_gather_uneven(comm, torch.ones(1).to(torch.half if comm.rank else None))
    )

    assert len(set(by_shape)) == len(set(by_dtype)) == 1
    assert (
        "rank 1 came with rows (3,) float32; ranks 0, 2 came with rows (2,) float32" in by_shape[0]
    )
    assert "rank 0 came with rows () float32; ranks 1-2 came with rows () float16" in by_dtype[0]


def test_a_rank_that_cannot_take_part_is_told_on_every_rank() -> None:
    def gather(comm: Communicator) -> None:
        all_gather_uneven(comm, [1.0] if comm.rank == 2 else torch.ones(1))  # type: ignore[arg-type]

    messages = messages_of_all(3, gather)

    assert len(set(messages)) == 1
    assert "rank 2 cannot take part: all_gather_uneven: expected a tensor, got list" in messages[0]


def test_objects_of_any_size_are_gathered() -> None:
    objects: list[Any] = ["", "x" * 10, {"a": list(range(1000))}]

    gathered = LocalWorld(3).run(lambda comm: all_gather_object(comm, objects[comm.rank]))

    assert gathered == [objects] * 3


def test_an_object_that_cannot_travel_is_told_on_every_rank() -> None:
    messages = messages_of_all(
        3, lambda comm: all_gather_object(comm, (lambda: 1) if comm.rank == 1 else 1)
    )

    assert len(set(messages)) == 1
    assert "all_gather_object: rank 1 could not encode its value: " in messages[0]


def test_an_object_that_one_rank_cannot_read_is_told_on_every_rank() -> None:
    def decode(data: bytes) -> object:
        raise ImportError("no module of that name")

    def gather(comm: Communicator) -> None:
        if comm.rank == 0:
            all_gather_object(comm, "x", decode=decode)
        else:
            all_gather_object(comm, "x")

    messages = messages_of_all(3, gather)

    assert set(messages) == {
        "all_gather_object: rank 0 could not decode the value of rank 0: ImportError: no module "
        "of that name"
    }


def test_peers_need_not_be_trusted_with_pickles() -> None:
    def gather(comm: Communicator) -> list[Any]:
        return all_gather_object(
            comm,
            {"rank": comm.rank},
            encode=lambda value: json.dumps(value).encode(),
            decode=json.loads,
        )

    assert LocalWorld(2).run(gather) == [[{"rank": 0}, {"rank": 1}]] * 2


@pytest.mark.parametrize("root", [0, 2])
def test_a_root_shares_its_object(root: int) -> None:
    def share(comm: Communicator) -> Any:
        return broadcast_object(comm, {"from": comm.rank}, root)

    assert LocalWorld(3).run(share) == [{"from": root}] * 3
    messages = messages_of_all(3, lambda comm: broadcast_object(comm, lambda: comm.rank, root))
    assert len(set(messages)) == 1
    assert f"broadcast_object: rank {root} could not encode its value" in messages[0]


def test_leaders_and_roots_are_counted_within_the_part() -> None:
    calls: list[int] = []

    def share(world: Communicator) -> int:
        part = world.split(world.rank // 2)
        assert part is not None

        def lead() -> int:
            calls.append(world.rank)
            return world.rank * 10

        return run_on_root(part, lead)

    assert LocalWorld(4).run(share) == [0, 0, 20, 20]
    assert sorted(calls) == [0, 2]


def test_a_leader_that_fails_tells_why_and_harms_nobody() -> None:
    def share(comm: Communicator) -> str:
        expected = FileNotFoundError if comm.rank == 1 else PeerFailedError
        with pytest.raises(expected) as caught:
            run_on_root(comm, fail, root=1)
        comm.barrier()
        return str(caught.value)

    def fail() -> None:
        raise FileNotFoundError("no data here")

    told = "rank 1 failed: FileNotFoundError: no data here"
    assert LocalWorld(3).run(share) == [told, "no data here", told]


def test_gathering_is_recorded_and_verified_like_other_operations() -> None:
    def gather(comm: Communicator) -> None:
        recorded = Recorded(comm, verify=True)
        all_gather_object(recorded, comm.rank)
        all_gather_uneven(recorded, torch.ones(comm.rank))
        assert set(recorded.traffic) == {"all_gather", "broadcast"}

    LocalWorld(3).run(gather)
