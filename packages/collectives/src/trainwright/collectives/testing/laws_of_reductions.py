"""Laws of the operations that combine what ranks contribute."""

from __future__ import annotations

import time

import torch

from trainwright.collectives.protocol import Communicator, ReduceOp
from trainwright.collectives.testing.cases import Case, contribution, lay_out


def all_reduce_combines_exactly(comm: Communicator, case: Case) -> None:
    """Every rank gets the exact combination, rounded once; memory around it stays as it was."""
    view, buffer = lay_out(contribution(case, comm.rank), case.layout, comm.device)
    around = buffer.clone()

    comm.all_reduce(view, case.op).wait()

    assert_same(view, combined(comm, case))
    view.copy_(contribution(case, comm.rank).to(comm.device))
    assert_same(buffer, around)


def all_reduce_is_reduce_then_broadcast(comm: Communicator, case: Case) -> None:
    """The two ways of combining give the same bits, and reduce changes only the root's tensor."""
    root = case.root % comm.size
    start = noise(comm, case, comm.rank)
    whole = start.clone()
    parts, _ = lay_out(start, case.layout, comm.device)

    comm.all_reduce(whole, case.op).wait()
    comm.reduce(parts, root, case.op).wait()

    assert_same(parts, whole if comm.rank == root else start)
    comm.broadcast(parts, root).wait()
    assert_same(parts, whole)


def reduce_scatter_is_reduce_then_scatter(comm: Communicator, case: Case) -> None:
    """Rank r gets row r of the combination."""
    root = case.root % comm.size
    rows = case.shape or (1,)
    shape = (comm.size * rows[0], *rows[1:])
    start = noise(comm, case, comm.rank, shape)
    given, _ = lay_out(start, case.layout, comm.device)
    output, _ = lay_out(torch.zeros(case.shape).to(case.dtype), case.layout, comm.device)
    expected = torch.empty(case.shape, dtype=case.dtype, device=comm.device)

    comm.reduce_scatter(output, given, case.op).wait()
    comm.reduce(start, root, case.op).wait()
    comm.scatter(expected, start if comm.rank == root else None, root).wait()

    assert_same(output, expected)


def all_reduce_is_reduce_scatter_then_all_gather(comm: Communicator, case: Case) -> None:
    """The plan of sharded data parallelism gives the bits of the plain one, also in place."""
    rows = case.shape or (1,)
    whole = noise(comm, case, comm.rank, (comm.size * rows[0], *rows[1:]))
    large = whole.clone()
    own = large[comm.rank * rows[0] : (comm.rank + 1) * rows[0]]

    comm.all_reduce(whole, case.op).wait()
    comm.reduce_scatter(own, large, case.op).wait()
    comm.all_gather(large, own).wait()

    assert_same(large, whole)


def every_rank_gets_the_same_bits(comm: Communicator, case: Case) -> None:
    """Values whose sums need rounding are rounded alike everywhere."""
    tensor = noise(comm, case, comm.rank, (257,))

    comm.all_reduce(tensor, case.op).wait()

    table = tensor.new_empty((comm.size * 257,))
    comm.all_gather(table, tensor).wait()
    for row in table.view(comm.size, 257):
        assert_same(row, tensor)


def averages_neither_overflow_nor_vanish(comm: Communicator, case: Case) -> None:
    """The mean of equal values is that value, at both ends of float16."""
    extremes = torch.tensor([30000.0, 65504.0, 2.0**-24, -(2.0**-24)], dtype=torch.float16)
    tensor = extremes.to(comm.device)

    comm.all_reduce(tensor, ReduceOp.AVG).wait()

    assert_same(tensor, extremes.to(comm.device))
    halves = torch.tensor([2.0, 4.0, 6.0], device=comm.device) * (comm.rank + 1)
    comm.all_reduce(halves, ReduceOp.AVG).wait()
    assert_same(halves, torch.tensor([2.0, 4.0, 6.0], device=comm.device) * (comm.size + 1) / 2)


def small_terms_are_not_lost_in_bfloat16(comm: Communicator, case: Case) -> None:
    """256 + 1 + 1 - 256 is 2, in every order of the ranks and by every way of combining."""
    terms = [256.0, 1.0, 1.0, -256.0] if comm.size == 4 else [256.0, 1.0, *[0.0] * 60]
    exact = torch.tensor(terms[: comm.size]).sum()
    turned = terms[: comm.size][case.root % comm.size :] + terms[: case.root % comm.size]
    mine = torch.full((comm.size,), turned[comm.rank], dtype=torch.bfloat16, device=comm.device)
    row = mine[:1].clone()

    comm.reduce_scatter(row, mine.clone()).wait()
    comm.all_reduce(mine).wait()

    expected = exact.to(comm.device, torch.bfloat16)
    assert_same(mine, expected.expand(comm.size))
    assert_same(row, expected.expand(1))


def integers_stay_exact(comm: Communicator, case: Case) -> None:
    """Sums of int64 do not pass through floating point."""
    tensor = torch.tensor([2**53 + 1 if comm.rank == 0 else 0], device=comm.device)

    comm.all_reduce(tensor).wait()

    assert tensor.tolist() == [2**53 + 1]


def not_a_number_is_never_hidden(comm: Communicator, case: Case) -> None:
    """One NaN on one rank is a NaN everywhere, also for the largest and the smallest."""
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG):
        for rank in range(comm.size):
            tensor = torch.full((2,), float(comm.rank), device=comm.device)
            tensor[1] = float("nan") if comm.rank == rank else 1.0

            comm.all_reduce(tensor, op).wait()

            assert tensor.isnan().tolist() == [False, True]


def reduce_dtype_is_the_dtype_of_the_sum(comm: Communicator, case: Case) -> None:
    """Asked for float64, a sum of float32 values is rounded once; asked for bfloat16, often."""
    tiny = torch.full((1,), 1.0 if comm.rank == 0 else 2.0**-30, device=comm.device)
    exact = tiny.clone()

    comm.all_reduce(exact, reduce_dtype=torch.float64).wait()

    total = 1.0 + (comm.size - 1) * 2.0**-30
    assert_same(exact, torch.tensor([total], dtype=torch.float64, device=comm.device).float())
    one = torch.ones(1, dtype=torch.bfloat16, device=comm.device)
    comm.all_reduce(one, reduce_dtype=torch.bfloat16).wait()
    assert one.item() == comm.size


def sums_are_in_rank_order_whoever_comes_first(comm: Communicator, case: Case) -> None:
    """Reductions follow one rule everywhere: in the order of the ranks, rounded once at the end."""
    for dtype, numel in ((torch.float32, 5), (torch.bfloat16, 36_001), (torch.float16, 70_003)):
        numbers = torch.arange(numel)
        given = [
            (torch.sin(numbers * (rank + 1.0)) * 10.0 ** (rank % 3)).to(dtype)
            for rank in range(comm.size)
        ]
        total = given[0].to(torch.float32, copy=True)
        for tensor in given[1:]:
            total += tensor.float()
        expected = (total / comm.size).to(dtype).to(comm.device)
        mine = given[comm.rank].to(comm.device)
        large = mine.repeat(comm.size)
        part = torch.empty_like(mine)
        reduced = mine.clone()
        if comm.rank == case.root % comm.size:
            time.sleep(0.002)

        works = [
            comm.reduce_scatter(part, large, ReduceOp.AVG),
            comm.reduce(reduced, 0, ReduceOp.AVG),
            comm.all_reduce(mine, ReduceOp.AVG),
        ]
        for work in works:
            work.wait()

        assert_same(mine, expected)
        assert_same(part, expected)
        assert comm.rank or torch.equal(reduced, expected)


def logical_operations_ask_what_is_not_zero(comm: Communicator, case: Case) -> None:
    """Fractions, negative numbers and NaN count, negative zero does not; the result is 1 or 0."""
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.uint16, torch.complex64):
        values = [0.25, -3.0, float("nan"), -0.0, 0.0]
        if not dtype.is_floating_point and not dtype.is_complex:
            values = [7, 1, 2, 0, 0]
        for op, among_others in (
            (ReduceOp.LOGICAL_OR, [1, 1, 1, 0, 0]),
            (ReduceOp.LOGICAL_XOR, [1, 1, 1, 0, 0]),
            (ReduceOp.LOGICAL_AND, [0, 0, 0, 0, 0] if comm.size > 1 else [1, 1, 1, 0, 0]),
        ):
            is_chosen = comm.rank == case.root % comm.size
            tensor = torch.tensor(values if is_chosen else [0] * 5, device=comm.device).to(dtype)

            comm.all_reduce(tensor, op).wait()

            assert tensor.dtype is dtype
            assert tensor.tolist() == among_others


LAWS_OF_REDUCTIONS = (
    all_reduce_combines_exactly,
    all_reduce_is_reduce_then_broadcast,
    reduce_scatter_is_reduce_then_scatter,
    all_reduce_is_reduce_scatter_then_all_gather,
    every_rank_gets_the_same_bits,
    averages_neither_overflow_nor_vanish,
    small_terms_are_not_lost_in_bfloat16,
    integers_stay_exact,
    not_a_number_is_never_hidden,
    reduce_dtype_is_the_dtype_of_the_sum,
    sums_are_in_rank_order_whoever_comes_first,
    logical_operations_ask_what_is_not_zero,
)


def combined(comm: Communicator, case: Case) -> torch.Tensor:
    """Return what all ranks' `values` combine to, computed in one process by another road."""
    wide = torch.float64 if case.dtype.is_floating_point else torch.int64
    wide = torch.complex128 if case.dtype.is_complex else wide
    stacked = torch.stack([contribution(case, rank).to(wide) for rank in range(comm.size)])
    if case.op.is_logical:
        count = (stacked != 0).sum(0)
        truth = {
            ReduceOp.LOGICAL_AND: count == comm.size,
            ReduceOp.LOGICAL_OR: count > 0,
            ReduceOp.LOGICAL_XOR: count % 2 == 1,
        }
        total = truth[case.op]
    elif case.op.is_bitwise:
        bits = torch.stack([stacked >> place & 1 for place in range(64)])
        count = bits.sum(1)
        found = {
            ReduceOp.BITWISE_AND: count == comm.size,
            ReduceOp.BITWISE_OR: count > 0,
            ReduceOp.BITWISE_XOR: count % 2 == 1,
        }
        places = torch.arange(64).view(-1, *[1] * (count.ndim - 1))
        total = (found[case.op].long() << places).sum(0)
    elif case.op is ReduceOp.SUM:
        total = stacked.sum(0)
    elif case.op is ReduceOp.AVG:
        total = stacked.mean(0)
    elif case.op is ReduceOp.PRODUCT:
        total = stacked.prod(0)
    else:
        total = stacked.amax(0) if case.op is ReduceOp.MAX else stacked.amin(0)
    if case.op is ReduceOp.AVG and case.dtype in (torch.float16, torch.bfloat16):
        # The quotient is rounded to float32 before it is rounded to its own dtype.
        total = total.float()
    return total.to(case.dtype).to(comm.device)


def noise(
    comm: Communicator, case: Case, rank: int, shape: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return contributions whose combination depends on the order, where the dtype allows it."""
    tensor = contribution(case, rank, shape)
    is_exact = case.op is ReduceOp.PRODUCT or case.op.is_logical
    if case.dtype.is_floating_point and not is_exact:
        tensor = (tensor.double() * 1.1 + 0.01).to(case.dtype)
    return tensor.to(comm.device)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless shapes, dtypes and all elements are the same, NaN included."""
    alike = actual.shape == expected.shape and actual.dtype is expected.dtype
    if not (alike and torch.equal(actual, expected)):
        # It is slower, but knows NaN and says what differs.
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
