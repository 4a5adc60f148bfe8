"""Laws of messages between two ranks, of works, and of groups made from groups."""

from __future__ import annotations

import pytest
import torch

from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Communicator, Recv, Send, Work
from trainwright.collectives.testing.cases import Case, contribution, lay_out
from trainwright.collectives.testing.laws_of_reductions import assert_same


def messages_go_round_a_ring(comm: Communicator, case: Case) -> None:
    """What is sent to the next rank arrives from the one before, in any layout."""
    if comm.size == 1:
        return
    after, before = _neighbours(comm)
    sent, _ = lay_out(contribution(case, comm.rank), case.layout, comm.device)
    came, _ = lay_out(torch.zeros(case.shape).to(case.dtype), case.layout, comm.device)

    receiving = comm.recv(came, before, 5)
    sending = comm.send(sent, after, 5)
    receiving.wait()
    sending.wait()

    assert_same(came, contribution(case, before).to(comm.device))


def exchanges_cannot_deadlock(comm: Communicator, case: Case) -> None:
    """Everybody may send to everybody at once, whatever the order of the messages."""
    mine = contribution(case, comm.rank).to(comm.device)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    came = {rank: torch.zeros_like(mine) for rank in others}
    messages = [
        message for peer in others for message in (Send(mine, peer), Recv(came[peer], peer))
    ]

    comm.exchange(messages).wait()

    for rank, tensor in came.items():
        assert_same(tensor, contribution(case, rank).to(comm.device))


def messages_of_one_tag_keep_their_order(comm: Communicator, case: Case) -> None:
    """Many messages may be under way between two ranks; each receive gets the next one."""
    if comm.size == 1:
        return
    after, before = _neighbours(comm)
    sent = [torch.tensor([comm.rank * 100 + turn], device=comm.device) for turn in range(20)]
    came = [torch.zeros_like(tensor) for tensor in sent]

    works = [comm.recv(tensor, before) for tensor in came]
    works += [comm.send(tensor, after) for tensor in sent]
    for work in works:
        work.wait()

    assert [int(tensor) for tensor in came] == [before * 100 + turn for turn in range(20)]


def tags_tell_messages_apart(comm: Communicator, case: Case) -> None:
    """Messages of different tags may be received in another order than they were sent in."""
    if comm.size == 1:
        return
    after, before = _neighbours(comm)
    tags = (3, 0, 1 << 16)
    sent = {tag: torch.tensor([comm.rank + 10 * tag], device=comm.device) for tag in tags}
    came = {tag: torch.zeros_like(tensor) for tag, tensor in sent.items()}

    works = [comm.send(sent[tag], after, tag) for tag in tags]
    works += [comm.recv(came[tag], before, tag) for tag in sorted(tags)]
    for work in works:
        work.wait()

    assert {tag: int(tensor) for tag, tensor in came.items()} == {
        tag: before + 10 * tag for tag in tags
    }


def works_may_be_waited_for_in_any_order(comm: Communicator, case: Case) -> None:
    """Started together, waited for backwards and twice, operations do not disturb each other."""
    ranks = sum(range(comm.size))
    # Buffers of the first turn may serve the second.
    for turn in (0, 10):
        tensors = [
            torch.full((numel,), float(turn + place + comm.rank), device=comm.device)
            for place, numel in enumerate((140_000, 3, 3, 140_000, 3))
        ]
        whole = torch.empty((comm.size,), device=comm.device)

        works = [comm.all_reduce(tensor) for tensor in tensors]
        own = torch.full((1,), float(comm.rank), device=comm.device)
        works.append(comm.all_gather(whole, own))
        for work in reversed(works):
            work.wait()
            work.wait()

        for place, tensor in enumerate(tensors):
            assert bool((tensor == (turn + place) * comm.size + ranks).all())
        assert whole.tolist() == list(range(comm.size))


def works_tell_whether_they_are_done(comm: Communicator, case: Case) -> None:
    """Asking does not wait for a peer that has not come, and changes nothing of what follows."""
    go = torch.zeros(1, device=comm.device)
    total = torch.full((case.root + 2,), 1.0 + comm.rank, device=comm.device)
    parts = torch.arange(comm.size * 70_000.0, device=comm.device)
    part = torch.empty(70_000, device=comm.device)
    others = [rank for rank in range(comm.size) if rank != 0]
    if comm.rank == 0:
        works = [comm.all_reduce(total), comm.reduce_scatter(part, parts)]
        assert comm.size == 1 or not any(work.is_done(0.001) for work in works)
        for peer in others:
            comm.send(go, peer, 3).wait()
    else:
        coming = comm.recv(go, 0, 3)
        coming.is_done()
        assert coming.is_done(30.0)
        coming.wait()
        works = [comm.all_reduce(total), comm.reduce_scatter(part, parts)]

    assert works[1].is_done(30.0)
    works[1].wait()
    works[0].wait()

    assert all(work.is_done() for work in works)
    assert set(total.tolist()) == {comm.size * (comm.size + 1) / 2}
    assert_same(part, comm.size * parts[comm.rank * 70_000 :][:70_000])


def works_may_be_forgotten(comm: Communicator, case: Case) -> None:
    """An operation nobody waits for may lack its result, but holds nobody up."""
    for _ in range(3):
        comm.all_reduce(torch.ones(4, device=comm.device))
        comm.broadcast(torch.ones(70_000, device=comm.device), 0)
        if comm.size > 1:
            after, before = _neighbours(comm)
            comm.send(torch.full((2,), 1.0 + comm.rank, device=comm.device), after, 9)
    comm.barrier()

    came = torch.zeros(2, device=comm.device)
    if comm.size > 1:
        for _ in range(3):
            comm.recv(came, before, 9).wait()
        assert came.tolist() == [1.0 + before] * 2
    comm.barrier()


def coalesced_operations_start_together(comm: Communicator, case: Case) -> None:
    """Inside the block nothing may be waited for; after it everything has its usual result."""
    added = torch.ones(4, device=comm.device)
    copied = torch.full((2,), float(comm.rank), device=comm.device)
    inner: list[Work] = []

    with comm.coalesce() as work:
        inner.append(comm.all_reduce(added))
        inner.append(comm.broadcast(copied, comm.size - 1))
        with pytest.raises(UsageError, match="after the block"):
            inner[0].wait()
    work.wait()
    inner[1].wait()

    assert added.tolist() == [comm.size] * 4
    assert copied.tolist() == [comm.size - 1] * 2


def barriers_return_when_all_have_come(comm: Communicator, case: Case) -> None:
    """A barrier takes part in the order of collectives like any other."""
    tensor = torch.ones(1, device=comm.device)
    work = comm.all_reduce(tensor)
    comm.barrier()
    work.wait()
    comm.barrier()

    assert tensor.item() == comm.size


def splits_order_their_ranks_by_key(comm: Communicator, case: Case) -> None:
    """Each color is a communicator of its own, ordered by (key, rank); no color, none."""
    color = None if comm.rank == comm.size - 1 and comm.size > 2 else comm.rank % 2
    part = comm.split(color, key=-comm.rank)

    colored = range(comm.size - 1 if comm.size > 2 else comm.size)
    if color is None:
        assert part is None
        return
    members = [rank for rank in reversed(colored) if rank % 2 == color]
    assert part is not None
    assert (part.size, part.rank) == (len(members), members.index(comm.rank))
    gathered = torch.empty(part.size, dtype=torch.int64, device=comm.device)
    part.all_gather(gathered, torch.tensor([comm.rank], device=comm.device)).wait()
    assert gathered.tolist() == members
    shared = torch.tensor([comm.rank], device=comm.device)
    part.broadcast(shared, part.size - 1).wait()
    assert shared.tolist() == [members[-1]]
    alone = part.split(part.rank)
    assert alone is not None
    assert (alone.size, alone.rank) == (1, 0)
    alone.all_reduce(shared).wait()
    assert shared.tolist() == [members[-1]]


LAWS_OF_MESSAGES = (
    messages_go_round_a_ring,
    exchanges_cannot_deadlock,
    messages_of_one_tag_keep_their_order,
    tags_tell_messages_apart,
    works_may_be_waited_for_in_any_order,
    works_tell_whether_they_are_done,
    works_may_be_forgotten,
    coalesced_operations_start_together,
    barriers_return_when_all_have_come,
    splits_order_their_ranks_by_key,
)


def _neighbours(comm: Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
