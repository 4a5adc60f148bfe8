"""What combining means: averages, exact integers, truth values, bits and the order of sums."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import Communicator, LocalWorld, ReduceOp, UsageError, arithmetic
from trainwright.collectives.arithmetic import combine
from trainwright.collectives.checks import resolve_reduce_dtype


def test_averages_divide_by_the_number_of_ranks_of_the_group() -> None:
    def average(world: Communicator) -> list[list[float]]:
        part = world.split(world.rank // 2)
        assert part is not None
        found = []
        for comm in (world, part):
            tensor = torch.tensor([2.0, 4.0, 6.0]) * (comm.rank + 1)
            large = tensor.repeat(comm.size)
            mine = torch.empty(3)
            comm.reduce_scatter(mine, large, ReduceOp.AVG).wait()
            comm.all_reduce(tensor, ReduceOp.AVG).wait()
            assert torch.equal(mine, tensor)
            found.append(tensor.tolist())
        return found

    assert LocalWorld(4).run(average) == [[[5.0, 10.0, 15.0], [3.0, 6.0, 9.0]]] * 4


@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "reduce_scatter"])
def test_averages_of_integers_are_refused_and_their_sums_are_exact(operation: str) -> None:
    def run(comm: Communicator) -> list[int]:
        tensor = torch.tensor([[4, 6], [8, 2]][comm.rank])
        with pytest.raises(UsageError, match=r"AVG of int64 .* use SUM and divide"):
            call(comm, operation, tensor, ReduceOp.AVG)
        large = torch.tensor([2**53 + 1, 0] if comm.rank == 0 else [0, 0])
        call(comm, operation, large, ReduceOp.SUM)
        return large.tolist()

    def call(comm: Communicator, name: str, tensor: torch.Tensor, op: ReduceOp) -> None:
        if name == "all_reduce":
            comm.all_reduce(tensor, op).wait()
        elif name == "reduce":
            comm.reduce(tensor, 0, op).wait()
        else:
            comm.reduce_scatter(tensor[comm.rank : comm.rank + 1], tensor, op).wait()

    assert LocalWorld(2).run(run)[0] == [9007199254740993, 0]


def test_every_order_of_ranks_keeps_small_terms_of_bfloat16() -> None:
    orders = sorted(set(itertools.permutations([256.0, 1.0, 1.0, -256.0])))

    def run(comm: Communicator) -> None:
        for order, numel in itertools.product(orders, (1, 64, 25_000)):
            tensor = torch.full((numel * 4,), order[comm.rank], dtype=torch.bfloat16)
            reduced = tensor.clone()
            part = torch.empty(numel, dtype=torch.bfloat16)
            gathered = torch.empty_like(tensor)
            comm.reduce(reduced, 1).wait()
            comm.reduce_scatter(part, tensor).wait()
            comm.all_gather(gathered, part).wait()
            comm.all_reduce(tensor).wait()
            assert bool((tensor == 2).all())
            assert bool((gathered == 2).all())
            assert comm.rank != 1 or bool((reduced == 2).all())

    LocalWorld(4).run(run)


@settings(max_examples=15)
@given(
    rows=st.integers(1, 5).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(0, 255), min_size=3, max_size=3), min_size=size, max_size=size
        )
    )
)
def test_bits_are_combined_as_integers_of_python_are(rows: list[list[int]]) -> None:
    def run(comm: Communicator) -> list[list[int]]:
        found = []
        for op in (ReduceOp.BITWISE_AND, ReduceOp.BITWISE_OR, ReduceOp.BITWISE_XOR):
            tensor = torch.tensor(rows[comm.rank], dtype=torch.uint8)
            comm.all_reduce(tensor, op).wait()
            found.append(tensor.tolist())
        return found

    columns = list(zip(*rows, strict=True))
    ands, ors, xors = [], [], []
    for column in columns:
        conjunction, disjunction, exclusive = 255, 0, 0
        for number in column:
            conjunction &= number
            disjunction |= number
            exclusive ^= number
        ands.append(conjunction)
        ors.append(disjunction)
        xors.append(exclusive)
    assert LocalWorld(len(rows)).run(run) == [[ands, ors, xors]] * len(rows)


def test_negative_integers_keep_their_sign_in_wider_bits() -> None:
    parts = [torch.tensor([-2, 5], dtype=torch.int8), torch.tensor([-4, 3], dtype=torch.int8)]
    output = torch.empty(2, dtype=torch.int8)

    combine([output], parts, ReduceOp.BITWISE_AND, torch.int64)

    assert output.tolist() == [-4, 1]


def test_truth_is_asked_of_many_ranks_at_once() -> None:
    def run(comm: Communicator) -> list[bool]:
        found = []
        for op in (ReduceOp.LOGICAL_AND, ReduceOp.LOGICAL_OR, ReduceOp.LOGICAL_XOR):
            tensor = torch.tensor([comm.rank == 3, comm.rank != 3, True, False])
            comm.all_reduce(tensor, op).wait()
            found.append(tensor.tolist())
        return found

    # Exclusive or is the parity of five ranks.
    assert (
        LocalWorld(5).run(run)
        == [[[False, False, True, False], [True, True, True, False], [True, False, True, False]]]
        * 5
    )


def test_only_what_has_a_meaning_is_combined() -> None:
    for op in ReduceOp:
        if op.is_logical:
            assert resolve_reduce_dtype("x", torch.complex64, op, None) is torch.bool
        elif op.is_bitwise:
            assert resolve_reduce_dtype("x", torch.bool, op, None) is torch.bool
            assert resolve_reduce_dtype("x", torch.int8, op, torch.int32) is torch.int32
            with pytest.raises(UsageError, match=r"or \.view\(\) of an integer dtype"):
                resolve_reduce_dtype("x", torch.float16, op, None)
    with pytest.raises(UsageError, match="SUM of bool is ambiguous; use LOGICAL_OR"):
        resolve_reduce_dtype("x", torch.bool, ReduceOp.SUM, None)


@pytest.mark.parametrize("place", [None, 0, 1, 2, 3])
def test_a_result_written_over_a_part_has_the_bits_of_the_sum_in_rank_order(
    place: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "_PLAIN_BYTES", 64)
    monkeypatch.setattr(arithmetic, "_WIDE_NUMEL", 16)
    random = torch.Generator().manual_seed(5)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    ops = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX)
    for size, dtype, op in itertools.product((2, 3, 4), dtypes, ops):
        # Two of them overflow in float16 unless the sum is wide.
        parts = [30_000 + 5_000 * torch.randn(37, generator=random) for _ in range(size)]
        parts = [part.to(dtype) for part in parts]
        total = parts[0].float()
        for part in parts[1:]:
            wide = part.float()
            total = torch.maximum(total, wide) if op is ReduceOp.MAX else total + wide
        expected = (total / size if op is ReduceOp.AVG else total).to(dtype)
        outputs = [torch.empty(37, dtype=dtype), parts[0]]
        if place is not None:
            outputs.insert(0, parts[place % size])

        combine(outputs, parts, op, torch.float32)

        for output in outputs:
            assert torch.equal(output, expected), (size, dtype, op)
