import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainwright.collectives.codec import (
    BlockFloat8,
    BlockInt8,
    Packing,
    compressed_all_gather,
    compressed_all_gather_with_feedback,
    compressed_all_reduce,
    compressed_reduce_scatter,
    compressed_reduce_scatter_with_feedback,
)
from trainwright.collectives.errors import CollectiveTimeoutError, UsageError
from trainwright.collectives.local_world import LocalWorld
from trainwright.collectives.protocol import ReduceOp, Work
from trainwright.collectives.single import SingleCommunicator

CODECS = [BlockInt8(4), BlockFloat8(7)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

worlds = given(
    size=st.integers(1, 5),
    rows=st.integers(0, 3),
    row=st.lists(st.integers(0, 6), max_size=2).map(tuple),
    dtype=st.sampled_from(DTYPES),
    codec=st.sampled_from(CODECS),
)


def values_of(rank, shape, dtype, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def wide(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


def there_and_back(codec, tensor, dtype):
    return codec.decode(codec.encode(tensor), tensor.shape, dtype)


class CountingCommunicator:
    """Counts the bytes that a rank gives to its peers."""

    def __init__(self, comm):
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self.bytes = 0
        self._comm = comm

    def all_gather(self, output, input, **options):
        self.bytes += input.nbytes * (self.size - 1)
        return self._comm.all_gather(output, input, **options)

    def all_to_all(self, output, input, **options):
        self.bytes += input.nbytes * (self.size - 1) // self.size
        return self._comm.all_to_all(output, input, **options)


@settings(max_examples=8)
@worlds
@example(size=3, rows=2, row=(5,), dtype=torch.bfloat16, codec=BlockInt8(4))
def test_a_compressed_gather_is_the_gather_of_what_each_part_decodes_to(
    size, rows, row, dtype, codec
):
    def body(comm):
        part = values_of(comm.rank, (rows, *row), dtype)
        output = torch.empty((size * rows, *row), dtype=dtype)
        compressed_all_gather(comm, output, part, codec).wait()
        whole = torch.empty_like(output)
        own = whole[comm.rank * rows : (comm.rank + 1) * rows].copy_(part)
        compressed_all_gather(comm, whole, own, codec).wait()
        return output, whole

    results = LocalWorld(size).run(body)

    parts = [values_of(rank, (rows, *row), dtype) for rank in range(size)]
    expected = torch.cat([there_and_back(codec, part, dtype) for part in parts])
    assert all(torch.equal(result, expected) for pair in results for result in pair)


@settings(max_examples=8)
@worlds
@example(size=3, rows=2, row=(5,), dtype=torch.float16, codec=BlockInt8(4))
def test_a_compressed_reduction_adds_what_arrives_and_the_own_part_in_rank_order_and_rounds_once(
    size, rows, row, dtype, codec
):
    def body(comm):
        source = values_of(comm.rank, (size * rows, *row), dtype)
        before = source.clone()
        output = torch.empty((rows, *row), dtype=dtype)
        compressed_reduce_scatter(comm, output, source, codec, ReduceOp.AVG).wait()
        assert torch.equal(source, before)
        part = source[comm.rank * rows : (comm.rank + 1) * rows]
        compressed_reduce_scatter(comm, part, source, codec, ReduceOp.AVG).wait()
        return output, part

    results = LocalWorld(size).run(body)

    for owner, (output, part) in enumerate(results):
        total = torch.zeros((rows, *row), dtype=wide(dtype))
        exact = torch.zeros((rows, *row), dtype=torch.float64)
        bound = torch.zeros((rows, *row), dtype=torch.float64)
        for rank in range(size):
            source = values_of(rank, (size, rows, *row), dtype)[owner]
            exact += source.double()
            if rank == owner:
                total += source
                continue
            total += there_and_back(codec, source, wide(dtype))
            bound += codec.error_bound(source)
        assert torch.equal(output, (total / size).to(dtype))
        assert torch.equal(part, output)
        # The mean is rounded to its dtype, and its terms (below 5 each) to that of the sum.
        rounding = torch.finfo(dtype).eps * output.abs().double() + size * 5 * 2.0**-23
        rounding += torch.finfo(dtype).smallest_normal
        assert ((output - exact / size).abs() <= bound / size + rounding).all()


@pytest.mark.parametrize("op", list(ReduceOp)[:5])
def test_what_codecs_keep_exactly_is_combined_exactly(op):
    def body(comm):
        # Small integers next to a 127 are kept as they are by scales of one.
        source = torch.tensor([127.0, 3.0, -2.0, 1.0]).repeat(comm.size)
        source[1::4] += comm.rank
        output = torch.empty(4)
        compressed_reduce_scatter(comm, output, source, BlockInt8(4), op).wait()
        expected = torch.empty(4)
        comm.reduce_scatter(expected, source, op).wait()
        return output, expected

    assert all(torch.equal(output, expected) for output, expected in LocalWorld(3).run(body))


def test_a_float16_mean_neither_overflows_nor_vanishes():
    def body(comm):
        source = torch.tensor([30000.0, 2.0**-24] * 4, dtype=torch.float16)
        output = torch.empty(2, dtype=torch.float16)
        compressed_reduce_scatter(comm, output, source, BlockInt8(1), ReduceOp.AVG).wait()
        return output.tolist()

    assert LocalWorld(4).run(body) == [[30000.0, 2.0**-24]] * 4


def test_an_overflow_on_one_rank_shows_in_the_sum_and_in_every_copy():
    def body(comm):
        source = torch.ones(6)
        if comm.rank == 1:
            source[4] = torch.inf
        output = torch.empty(2)
        compressed_reduce_scatter(comm, output, source, BlockFloat8()).wait()
        whole = torch.empty(6)
        compressed_all_gather(comm, whole, output, BlockInt8()).wait()
        return whole.isfinite().tolist()

    assert LocalWorld(3).run(body) == [[True] * 4 + [False] * 2] * 3


def test_a_rank_sends_the_encoded_parts_of_the_others_and_nothing_else():
    codec = BlockInt8(128)

    def body(comm):
        gathering, scattering = CountingCommunicator(comm), CountingCommunicator(comm)
        whole, part = torch.zeros(4 * 1000), torch.zeros(1000)
        compressed_all_gather(gathering, whole, part, codec).wait()
        compressed_reduce_scatter(scattering, part, whole, codec).wait()
        return gathering.bytes, scattering.bytes

    encoded = Packing.of(codec.encode(torch.zeros(1000))).num_bytes

    assert LocalWorld(4).run(body) == [(3 * encoded, 3 * encoded)] * 4
    # 1000 integers, eight scales, and up to 15 bytes behind each of the two.
    assert 1032 <= encoded < 1032 + 30


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_with_feedback_what_is_lost_stays_bounded_while_the_sums_grow(op):
    size, steps, codec = 3, 10, BlockFloat8(8)

    def body(comm):
        residual = None
        sums = torch.zeros(2, 4, dtype=torch.float64)
        plain = torch.zeros(2, 4, dtype=torch.float64)
        output = torch.empty(2, 4)
        for _ in range(steps):
            source = values_of(comm.rank, (6, 4), torch.float32)
            work, residual = compressed_reduce_scatter_with_feedback(
                comm, output, source, codec, residual, op
            )
            work.wait()
            sums += output
            compressed_reduce_scatter(comm, output, source, codec, op).wait()
            plain += output
        return sums, plain, residual

    results = LocalWorld(size).run(body)

    divisor = size if op is ReduceOp.AVG else 1
    exact = steps * sum(values_of(rank, (6, 4), torch.float32).double() for rank in range(size))
    for rank, (sums, plain, residual) in enumerate(results):
        own = slice(2 * rank, 2 * rank + 2)
        rest = sum(other[own] for _, _, other in results) / divisor
        # Sums of thirty float32 terms, each below 5, are rounded at each step.
        torch.testing.assert_close(
            sums + rest, exact[own] / divisor, rtol=0, atol=30 * 5 * 2.0**-23
        )
        assert not residual[own].any()
        assert (sums - exact[own] / divisor).abs().max() < (
            plain - exact[own] / divisor
        ).abs().max() / 4


def test_with_feedback_gathered_sums_and_the_last_residual_are_the_sum_of_the_inputs():
    def body(comm):
        residual = None
        sums = torch.zeros(6, 3, dtype=torch.float64)
        output = torch.empty(6, 3, dtype=torch.float64)
        for step in range(8):
            part = values_of(comm.rank, (2, 3), torch.float64, step)
            work, residual = compressed_all_gather_with_feedback(
                comm, output, part, BlockInt8(), residual
            )
            work.wait()
            sums += output
        return sums, residual

    results = LocalWorld(3).run(body)

    exact = torch.cat(
        [
            sum(values_of(rank, (2, 3), torch.float64, step) for step in range(8))
            for rank in range(3)
        ]
    )
    rest = torch.cat([residual for _, residual in results])
    for sums, _ in results:
        # Eight steps of float64 additions of numbers below 40.
        torch.testing.assert_close(sums + rest, exact, rtol=0, atol=8 * 40 * 2.0**-52)
    assert rest.abs().max() > 0


def test_inputs_may_change_and_works_may_wait_in_any_order_once_they_have_started():
    def body(comm):
        source = torch.full((4, 3), float(comm.rank + 1))
        first, second = torch.empty(2, 3), torch.empty(8, 3)
        reducing = compressed_reduce_scatter(comm, first, source, BlockInt8())
        gathering = compressed_all_gather(comm, second, source, BlockInt8())
        source.fill_(torch.nan)
        assert isinstance(reducing, Work)
        gathering.wait(10.0)
        reducing.wait(10.0)
        assert reducing.is_done()
        first_again = first.clone().fill_(5.0)
        first.copy_(first_again)
        reducing.wait()
        assert torch.equal(first, first_again)
        return second[:, 0].round().tolist()

    assert LocalWorld(2).run(body) == [[1.0] * 4 + [2.0] * 4] * 2


def test_strided_outputs_and_leaves_that_want_gradients_are_written_by_value():
    def body(comm):
        base = torch.zeros(4, 2)
        leaf = torch.full((2,), 3.0, requires_grad=True)
        compressed_all_gather(comm, base[:, 1], leaf, BlockInt8()).wait()
        scalar = torch.empty((), requires_grad=True)
        compressed_reduce_scatter(comm, scalar, base[:2, 1], BlockInt8()).wait()
        return base.tolist(), scalar.item()

    assert LocalWorld(2).run(body) == [([[0.0, 3.0]] * 4, 6.0)] * 2


def test_one_rank_alone_gathers_what_it_encodes_and_reduces_without_loss():
    comm = SingleCommunicator()
    part = values_of(0, (5,), torch.float32)
    gathered, reduced = torch.empty(5), torch.empty(5)

    compressed_all_gather(comm, gathered, part, BlockInt8()).wait()
    compressed_reduce_scatter(comm, reduced, part, BlockInt8()).wait()

    assert torch.equal(gathered, there_and_back(BlockInt8(), part, torch.float32))
    assert torch.equal(reduced, part)


def test_a_rank_that_stays_away_is_named_at_the_timeout():
    def body(comm):
        if comm.rank == 1:
            return None
        work = compressed_all_gather(
            comm, torch.empty(4), torch.ones(2), BlockInt8(), timeout_s=0.2
        )
        with pytest.raises(CollectiveTimeoutError):
            work.wait()
        return None

    LocalWorld(2).run(body)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            lambda comm: compressed_all_gather(comm, torch.ones(5), torch.ones(2), BlockInt8()),
            "the whole must be",
        ),
        (
            lambda comm: compressed_all_gather(
                comm, torch.ones(4).half(), torch.ones(2), BlockInt8()
            ),
            "must be alike",
        ),
        (
            lambda comm: compressed_all_gather(
                comm, torch.ones(1).expand(4), torch.ones(2), BlockInt8()
            ),
            "share memory",
        ),
        (
            lambda comm: compressed_all_gather(
                comm, torch.ones(4).long(), torch.ones(2).long(), BlockInt8()
            ),
            "got int64",
        ),
        (
            lambda comm: compressed_reduce_scatter(comm, torch.ones(4), torch.ones(2), BlockInt8()),
            "the whole must be",
        ),
        (
            lambda comm: compressed_reduce_scatter(
                comm, torch.ones(2), torch.ones(4), BlockInt8(), "sum"
            ),
            "op must be a ReduceOp",
        ),
        (
            lambda comm: compressed_reduce_scatter_with_feedback(
                comm, torch.ones(2), torch.ones(4), BlockInt8(), None, ReduceOp.MAX
            ),
            "only what SUM and AVG lose",
        ),
        (
            lambda comm: compressed_reduce_scatter_with_feedback(
                comm, torch.ones(2).half(), torch.ones(4).half(), BlockInt8(), torch.ones(4).half()
            ),
            "residual must be torch.float32",
        ),
        (
            lambda comm: compressed_all_gather_with_feedback(
                comm, torch.ones(4), torch.ones(2), BlockInt8(), torch.ones(4)
            ),
            "None begins anew",
        ),
        (
            lambda comm: compressed_all_gather(comm, torch.ones(4), torch.ones(2), None),
            r"expected a codec, such as BlockInt8\(\), got None",
        ),
        (
            lambda comm: compressed_all_gather_with_feedback(
                comm, torch.ones(4), torch.ones(2), BlockInt8, None
            ),
            "expected a codec.*got <class",
        ),
        (
            lambda comm: compressed_reduce_scatter(comm, torch.ones(2), torch.ones(4), None),
            "expected a codec",
        ),
        (
            lambda comm: compressed_reduce_scatter_with_feedback(
                comm, torch.ones(2), torch.ones(4), None, None
            ),
            "expected a codec",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(mistake, message):
    def body(comm):
        counting = CountingCommunicator(comm)
        with pytest.raises(UsageError, match=message):
            mistake(counting)
        return counting.bytes

    assert LocalWorld(2).run(body) == [0, 0]


class FailingCodec(BlockInt8):
    """Fails to decode whatever has come, once it has been told to."""

    is_failing = False

    def decode(self, parts, shape, dtype):
        if FailingCodec.is_failing:
            raise ZeroDivisionError("on purpose")
        return super().decode(parts, shape, dtype)


@pytest.mark.parametrize("kind", ["gather", "scatter", "all_reduce"])
def test_what_could_not_be_decoded_is_no_result_at_any_later_wait(kind, monkeypatch):
    def body(comm):
        codec = FailingCodec(4)
        if kind == "gather":
            work = compressed_all_gather(comm, torch.zeros(4), torch.ones(2), codec)
        elif kind == "scatter":
            work = compressed_reduce_scatter(comm, torch.zeros(2), torch.ones(4), codec)
        else:
            work = compressed_all_reduce(comm, torch.ones(4), codec)
        monkeypatch.setattr(FailingCodec, "is_failing", True)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                work.wait()

    LocalWorld(2).run(body)
