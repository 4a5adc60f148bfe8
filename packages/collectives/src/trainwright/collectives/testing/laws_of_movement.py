"""Laws of the operations that move what ranks have, without changing it."""

from __future__ import annotations

import torch

from trainwright.collectives.objects import all_gather_object
from trainwright.collectives.protocol import Communicator
from trainwright.collectives.testing.cases import OTHERS, Case, Layout, contribution, lay_out
from trainwright.collectives.testing.laws_of_reductions import assert_same
from trainwright.collectives.uneven import all_gather_uneven


def all_gather_is_gather_then_broadcast(comm: Communicator, case: Case) -> None:
    """Every rank gets everything, in the order of the ranks; the root alone by gather."""
    root = case.root % comm.size
    mine, _ = lay_out(contribution(case, comm.rank), case.layout, comm.device)
    whole, buffer = _blank(comm, case, case.layout)
    around = buffer.clone()
    gathered = _blank(comm, case, case.layout)[0]

    comm.all_gather(whole, mine).wait()
    comm.gather(gathered if comm.rank == root else None, mine, root).wait()
    comm.broadcast(gathered, root).wait()

    expected = _concatenated(comm, case)
    assert_same(whole, expected)
    assert_same(gathered, expected)
    whole.copy_(_blank(comm, case, case.layout)[0])
    assert_same(buffer, around)


def broadcast_copies_the_root(comm: Communicator, case: Case) -> None:
    """All end with the root's values, and nothing around them is touched."""
    root = case.root % comm.size
    start = contribution(case, comm.rank)
    view, buffer = lay_out(start, case.layout, comm.device)
    around = buffer.clone()

    comm.broadcast(view, root).wait()

    assert_same(view, contribution(case, root).to(comm.device))
    view.copy_(start.to(comm.device))
    assert_same(buffer, around)


def scatter_undoes_gather(comm: Communicator, case: Case) -> None:
    """What a root has gathered and scatters again comes back to where it was."""
    root = case.root % comm.size
    mine, _ = lay_out(contribution(case, comm.rank), case.layout, comm.device)
    whole = _blank(comm, case, case.layout)[0] if comm.rank == root else None
    back, _ = lay_out(torch.zeros(case.shape).to(case.dtype), case.layout, comm.device)

    comm.gather(whole, mine, root).wait()
    comm.scatter(back, whole, root).wait()

    assert_same(back, mine)


def all_to_all_twice_is_nothing(comm: Communicator, case: Case) -> None:
    """Rank q gets part q of every rank, and sending the parts back restores them."""
    splits = [(3 * comm.rank + 2 * rank + case.root) % 4 for rank in range(comm.size)]
    incoming = [(3 * rank + 2 * comm.rank + case.root) % 4 for rank in range(comm.size)]
    tail = case.shape[1:]
    start = contribution(case, comm.rank, (sum(splits), *tail))
    given, _ = lay_out(start, case.layout, comm.device)
    arrived = torch.empty((sum(incoming), *tail), dtype=case.dtype, device=comm.device)
    back = torch.empty_like(given)

    comm.all_to_all(arrived, given, incoming, splits).wait()
    comm.all_to_all(back, arrived, splits, incoming).wait()

    assert_same(back, start.to(comm.device))
    for sender, part in enumerate(torch.split(arrived, incoming)):
        sent = [(3 * sender + 2 * rank + case.root) % 4 for rank in range(comm.size)]
        everything = contribution(case, sender, (sum(sent), *tail)).to(comm.device)
        assert_same(part, torch.split(everything, sent)[comm.rank])


def equal_parts_need_no_splits(comm: Communicator, case: Case) -> None:
    """Without splits an all-to-all transposes the matrix of parts."""
    table = torch.arange(comm.size, device=comm.device)
    arrived = torch.empty_like(table)

    comm.all_to_all(arrived, table + 100 * comm.rank).wait()

    assert_same(arrived, table * 100 + comm.rank)


def own_slices_may_be_passed(comm: Communicator, case: Case) -> None:
    """The small tensor may be this rank's part of the large one."""
    rows = (case.shape or (1,))[0]
    mine = contribution(case, comm.rank).to(comm.device)
    whole = _blank(comm, case, Layout.CONTIGUOUS)[0]
    own = whole[comm.rank * rows : (comm.rank + 1) * rows]
    own.copy_(mine)

    comm.all_gather(whole, own).wait()

    assert_same(whole, _concatenated(comm, case))


def bytes_are_bytes_whatever_the_dtype(comm: Communicator, case: Case) -> None:
    """Dtypes without arithmetic travel as well."""
    for dtype in OTHERS:
        tensor = (torch.arange(6, device=comm.device) % 5 + comm.rank).to(dtype)
        whole = tensor.repeat(comm.size)

        comm.all_gather(whole, tensor).wait()
        comm.broadcast(tensor, comm.size - 1).wait()

        raw = whole.view(torch.uint8).view(comm.size, -1)
        assert_same(tensor.view(torch.uint8), raw[-1])


def expanded_inputs_are_read_as_they_look(comm: Communicator, case: Case) -> None:
    """A tensor whose elements share memory may be sent, if not received into."""
    one = torch.tensor([[1.0], [2.0]], device=comm.device) + 10 * comm.rank
    wide = one.expand(2, 3)
    whole = torch.empty((2 * comm.size, 3), device=comm.device)
    added = torch.empty((2, 3), device=comm.device)

    comm.all_gather(whole, wide).wait()
    comm.reduce_scatter(added, one[:1].expand(2 * comm.size, 3)).wait()

    firsts = whole.view(comm.size, 2, 3)[:, 0, 2].tolist()
    assert firsts == [1.0 + 10 * rank for rank in range(comm.size)]
    assert set(added.flatten().tolist()) == {sum(firsts)}


def conjugates_travel_as_they_look(comm: Communicator, case: Case) -> None:
    """Views that conjugate or negate on reading are sent, and received into, by value."""
    start = torch.tensor([1 + 2j, 3 - 4j], device=comm.device) * (comm.rank + 1)
    conjugate = start.conj()
    negated = start.conj().imag
    whole = torch.empty(2 * comm.size, dtype=torch.float32, device=comm.device)

    comm.all_gather(whole, negated).wait()
    comm.broadcast(conjugate, comm.size - 1).wait()

    assert whole[:2].tolist() == [-2.0, 4.0]
    assert start.tolist() == [(1 + 2j) * comm.size, (3 - 4j) * comm.size]


def rows_of_any_number_are_gathered(comm: Communicator, case: Case) -> None:
    """Ranks may differ in their rows, and have none; objects may differ in size as well."""
    counts = [(2 * rank + case.root) % 3 for rank in range(comm.size)]
    parts = [
        contribution(case, rank, (count, *case.shape[1:])) for rank, count in enumerate(counts)
    ]
    mine, _ = lay_out(parts[comm.rank], case.layout, comm.device)

    whole, found = all_gather_uneven(comm, mine)
    values = all_gather_object(comm, "x" * 100 * comm.rank)

    assert found == counts
    assert_same(whole, torch.cat(parts).to(comm.device))
    assert values == ["x" * 100 * rank for rank in range(comm.size)]


LAWS_OF_MOVEMENT = (
    all_gather_is_gather_then_broadcast,
    broadcast_copies_the_root,
    scatter_undoes_gather,
    all_to_all_twice_is_nothing,
    equal_parts_need_no_splits,
    own_slices_may_be_passed,
    bytes_are_bytes_whatever_the_dtype,
    expanded_inputs_are_read_as_they_look,
    conjugates_travel_as_they_look,
    rows_of_any_number_are_gathered,
)


def _whole_shape(comm: Communicator, case: Case) -> tuple[int, ...]:
    rows = case.shape or (1,)
    return (comm.size * rows[0], *rows[1:])


def _blank(comm: Communicator, case: Case, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    zeros = torch.zeros(_whole_shape(comm, case)).to(case.dtype)
    return lay_out(zeros, layout, comm.device)


def _concatenated(comm: Communicator, case: Case) -> torch.Tensor:
    parts = [contribution(case, rank) for rank in range(comm.size)]
    return torch.stack(parts).view(_whole_shape(comm, case)).to(comm.device)
