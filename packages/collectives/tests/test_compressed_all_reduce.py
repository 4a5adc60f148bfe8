import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld, Recorded, ReduceOp, SingleCommunicator, UsageError
from trainwright.collectives.codec import (
    BlockFloat8,
    BlockInt8,
    Packing,
    compressed_all_gather,
    compressed_all_reduce,
    compressed_all_reduce_with_feedback,
    compressed_reduce_scatter,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def values_of(rank, shape, dtype, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def wide(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


def expected_of(size, shape, dtype, codec, op):
    """Return what one process computes, and how far it may be from the exact result."""
    given = [values_of(rank, shape, dtype).flatten() for rank in range(size)]
    rows = -(-given[0].numel() // size)
    filled = [torch.cat([x, x.new_zeros(size * rows - x.numel())]).view(size, rows) for x in given]
    divisor = size if op is ReduceOp.AVG else 1
    results, bounds = [], []
    for owner in range(size):
        total = torch.zeros(rows, dtype=wide(dtype))
        bound = torch.zeros(rows, dtype=torch.float64)
        for rank, parts in enumerate(filled):
            if rank == owner:
                total += parts[owner]
            else:
                encoded = codec.encode(parts[owner])
                total += codec.decode(encoded, (rows,), wide(dtype))
                bound += codec.error_bound(parts[owner])
        total /= divisor
        results.append(codec.decode(codec.encode(total), (rows,), dtype))
        bounds.append(bound / divisor + codec.error_bound(total))
    exact = sum(x.double() for x in given) / divisor
    return *(torch.cat(x)[: exact.numel()].view(shape) for x in (results, bounds)), exact.view(
        shape
    )


@settings(max_examples=12)
@given(
    size=st.integers(1, 5),
    shape=st.lists(st.integers(0, 6), max_size=2).map(tuple),
    dtype=st.sampled_from(DTYPES),
    codec=st.sampled_from([BlockInt8(4), BlockFloat8(7)]),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.AVG]),
)
@example(size=3, shape=(4, 5), dtype=torch.bfloat16, codec=BlockInt8(4), op=ReduceOp.AVG)
@example(size=4, shape=(2,), dtype=torch.float32, codec=BlockFloat8(7), op=ReduceOp.SUM)
def test_every_rank_gets_the_same_bits_within_the_stated_bound(size, shape, dtype, codec, op):
    def body(comm):
        tensor = values_of(comm.rank, shape, dtype)
        compressed_all_reduce(comm, tensor, codec, op).wait()
        return tensor

    results = LocalWorld(size).run(body)

    expected, bound, exact = expected_of(size, shape, dtype, codec, op)
    # Sums of up to five terms below 5, rounded to their dtype and then to the tensor's.
    rounding = 2.0**-21 * 25 + torch.finfo(dtype).eps * expected.abs().double()
    for result in results:
        assert torch.equal(result, expected)
        assert ((result.double() - exact).abs() <= bound + rounding).all()


def test_it_is_the_compressed_reduction_and_then_the_compressed_gather_of_the_sums():
    def body(comm):
        tensor = values_of(comm.rank, (6, 5), torch.float32)
        part, whole = torch.empty(2, 5), torch.empty(6, 5)
        compressed_reduce_scatter(comm, part, tensor, BlockInt8(4)).wait()
        compressed_all_gather(comm, whole, part, BlockInt8(4)).wait()
        compressed_all_reduce(comm, tensor, BlockInt8(4)).wait()
        return torch.equal(tensor, whole)

    assert all(LocalWorld(3).run(body))


@pytest.mark.parametrize("numel", [4000, 3997])
def test_a_rank_sends_the_encoded_parts_twice_and_nothing_else(numel):
    codec = BlockInt8(128)

    def body(comm):
        recorded = Recorded(comm)
        tensor = torch.ones(numel)
        compressed_all_reduce(recorded, tensor, codec).wait()
        assert tensor.eq(4).all()
        return recorded.traffic.total.bytes_sent

    encoded = Packing.of(codec.encode(torch.zeros(1000))).num_bytes

    assert LocalWorld(4).run(body) == [2 * 3 * encoded] * 4
    # Uncompressed it is 2 * 3 * 4000 bytes: 3.8 times as many.
    assert 2 * 3 * encoded < 2 * 3 * 4000 / 3.8


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_with_feedback_what_is_lost_stays_bounded_while_the_sums_grow(op, dtype):
    size, steps, shape, codec = 3, 12, (7, 2), BlockFloat8(8)

    def body(comm):
        residual = None
        sums = torch.zeros(shape, dtype=torch.float64)
        plain = torch.zeros(shape, dtype=torch.float64)
        for _ in range(steps):
            tensor = values_of(comm.rank, shape, dtype)
            once = tensor.clone()
            work, residual = compressed_all_reduce_with_feedback(comm, tensor, codec, residual, op)
            work.wait()
            sums += tensor
            compressed_all_reduce(comm, once, codec, op).wait()
            plain += once
        return sums, plain, residual

    results = LocalWorld(size).run(body)

    divisor = size if op is ReduceOp.AVG else 1
    exact = steps * sum(values_of(rank, shape, dtype).double() for rank in range(size)) / divisor
    rest = sum(residual for *_, residual in results) / divisor
    for sums, plain, residual in results:
        assert residual.dtype is torch.float32
        assert residual.shape == shape
        # Twelve steps of sums of three float32 terms, each below 5.
        torch.testing.assert_close(sums + rest, exact, rtol=0, atol=36 * 5 * 2.0**-23)
        assert (sums - exact).abs().max() < (plain - exact).abs().max() / 3


def test_an_overflow_on_one_rank_shows_on_all():
    def body(comm):
        tensor = torch.ones(12)
        tensor[4] = torch.inf if comm.rank == 1 else 1.0
        compressed_all_reduce(comm, tensor, BlockInt8(2)).wait()
        return tensor.isfinite().tolist()

    assert LocalWorld(2).run(body) == [[True] * 4 + [False] * 2 + [True] * 6] * 2


def test_a_second_round_that_cannot_start_is_not_over():
    class WithoutGather:
        def __init__(self, comm):
            self._comm = comm

        def __getattr__(self, name):
            return getattr(self._comm, name)

        def all_gather(self, *args, **options):
            raise UsageError("no gather")

    work = compressed_all_reduce(WithoutGather(SingleCommunicator()), torch.ones(3), BlockInt8())

    for _ in range(2):
        with pytest.raises(UsageError, match="no gather"):
            work.wait()
        assert not work.is_done()


def test_works_in_one_order_everywhere_write_strided_tensors_and_leaves_by_value():
    def body(comm):
        base = torch.zeros(5, 2)
        base[:, 1] = comm.rank + 1
        leaf = torch.full((3,), 2.0, requires_grad=True)
        first = compressed_all_reduce(comm, base[:, 1], BlockInt8())
        second = compressed_all_reduce(comm, leaf, BlockInt8())
        assert not second.is_done()
        second.wait()
        first.wait(10.0)
        first.wait()
        assert first.is_done()
        return base.tolist(), leaf.tolist()

    assert LocalWorld(2).run(body) == [([[0.0, 3.0]] * 5, [4.0] * 3)] * 2


def test_one_rank_alone_gets_what_its_tensor_is_encoded_to():
    tensor = values_of(0, (5,), torch.float32)
    codec = BlockInt8(2)
    expected = codec.decode(codec.encode(tensor), tensor.shape, tensor.dtype)

    compressed_all_reduce(SingleCommunicator(), tensor, codec).wait()

    assert torch.equal(tensor, expected)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda c: compressed_all_reduce(c, torch.ones(4), BlockInt8(), ReduceOp.MAX), "op=MAX"),
        (lambda c: compressed_all_reduce(c, torch.ones(4), BlockInt8(), "sum"), "be a ReduceOp"),
        (lambda c: compressed_all_reduce(c, torch.ones(1).expand(3), BlockInt8()), "share memory"),
        (lambda c: compressed_all_reduce(c, torch.ones(4).long(), BlockInt8()), "int64"),
        (lambda c: compressed_all_reduce(c, torch.ones(4), None), "expected a codec"),
        (
            lambda c: compressed_all_reduce_with_feedback(
                c, torch.ones(4), BlockInt8(), torch.ones(3)
            ),
            "None begins anew",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(mistake, message):
    def body(comm):
        recorded = Recorded(comm)
        with pytest.raises(UsageError, match=message):
            mistake(recorded)
        return recorded.traffic.total.operations

    assert LocalWorld(2).run(body) == [0, 0]
