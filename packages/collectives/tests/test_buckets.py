"""Gradient buckets: whatever happens between two steps, ranks end with the same right gradients."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import (
    CollectiveTimeoutError,
    LocalWorld,
    Recorded,
    ReduceOp,
    SingleCommunicator,
    UsageError,
)
from trainwright.collectives.buckets import GradientBuckets, UnusedParameterError, plan_buckets
from trainwright.collectives.codec import BlockInt8, compressed_all_reduce

DTYPES = [torch.float32, torch.float16, torch.float64]


def parameter(shape, dtype=torch.float32):
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def scalars(*names):
    return {name: nn.Parameter(torch.tensor(0.0)) for name in names}


def with_wide_gradients():
    made = parameter((1,), torch.bfloat16)
    made.grad_dtype = torch.float32
    return made


def grads(parameters):
    return [None if p.grad is None else p.grad.item() for p in parameters.values()]


class SpyCommunicator:
    """Tells what it is asked, through a list."""

    def __init__(self, comm):
        self._comm = comm
        self.asked = []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def all_reduce(self, tensor, *args, **options):
        self.asked.append(tensor.numel())
        return self._comm.all_reduce(tensor, *args, **options)

    def empty(self, shape, *, dtype=torch.float32):
        self.asked.append("memory")
        # In the middle of other memory, as an arena's would be.
        return torch.full((3 + shape[0],), torch.nan, dtype=dtype)[3:]


# ---------------------------------------------------------------- plans


@settings(max_examples=15)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), min_size=1, max_size=12),
    bucket_bytes=st.integers(1, 300),
    first=st.none() | st.integers(1, 100),
    data=st.data(),
)
def test_each_gradient_lies_in_one_bucket_of_its_dtype_without_gaps_and_within_the_limit(
    sizes, bucket_bytes, first, data
):
    parameters = {f"p{i}": parameter((n,), dtype) for i, (n, dtype) in enumerate(sizes)}
    order = data.draw(st.permutations(list(parameters)))

    plan = plan_buckets(
        parameters.items(), bucket_bytes=bucket_bytes, first_bucket_bytes=first, order=order
    )

    assert sorted(plan.names) == sorted(parameters)
    first = min(1 << 20, bucket_bytes) if first is None else first
    seen = set()
    ends = []
    for bucket in plan.buckets:
        offset = 0
        for slot in bucket.slots:
            assert slot.offset == offset
            assert parameters[slot.name].dtype is bucket.dtype
            offset += slot.numel
        limit = bucket_bytes if bucket.dtype in seen else first
        seen.add(bucket.dtype)
        assert bucket.num_bytes == offset * bucket.dtype.itemsize
        assert bucket.num_bytes <= limit or sum(slot.numel > 0 for slot in bucket.slots) == 1
        places = [order.index(slot.name) for slot in bucket.slots]
        assert places == sorted(places)
        ends.append(places[-1])
    assert ends == sorted(ends)  # all ranks launch what is complete first
    assert plan.num_bytes == sum(n * dtype.itemsize for n, dtype in sizes)


def test_without_an_order_gradients_lie_in_reverse_order_of_use():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    model[0].bias.requires_grad_(False)

    plan = plan_buckets(model, bucket_bytes=30)

    assert plan.names == ("1.weight", "0.weight")
    assert str(plan) == "0: float32, 12 bytes, 1.weight\n1: float32, 24 bytes, 0.weight"
    assert plan == plan_buckets(list(model.named_parameters()), bucket_bytes=30)


def test_gradients_lie_as_their_parameters_do():
    weight = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    buckets = GradientBuckets([("weight", weight)], SingleCommunicator())

    (weight * torch.arange(5.0)).sum().backward()
    buckets.finish()

    assert weight.grad.stride() == weight.stride()
    assert torch.equal(weight.grad, torch.arange(5.0).expand_as(weight))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda a, b: plan_buckets([("a", a), ("a", b)]), "'a' is given twice"),
        (lambda a, b: plan_buckets([("a", a), ("b", a)]), "'a' and 'b' are the same tensor"),
        (lambda a, b: plan_buckets([("a", a * 2)]), "'a' must be a leaf"),
        (lambda a, b: plan_buckets([("a", a.detach())]), "no parameter is trained"),
        (lambda a, b: plan_buckets([("a", a)], bucket_bytes=0), "bucket_bytes=0 must be a"),
        (lambda a, b: plan_buckets([("a", a)], bucket_bytes=2.5), "bucket_bytes=2.5 must be a"),
        (
            lambda a, b: plan_buckets([("a", a)], first_bucket_bytes="1"),
            "first_bucket_bytes='1' must be a positive",
        ),
        (lambda a, b: plan_buckets([("a", a)], order=3), "order must be a list of names, got 3"),
        (lambda a, b: plan_buckets([("a", a)], order=[["a"]]), "order must be a list of names"),
        (lambda a, b: plan_buckets([("a", a), ("b", b)], order=["a", "c"]), "missing: b; unknown"),
        (
            lambda a, b: GradientBuckets([("a", a)], SingleCommunicator(), op=ReduceOp.MAX),
            "averaged or summed",
        ),
        (
            lambda a, b: GradientBuckets([("a", a)], SingleCommunicator(), reduce_dtype=torch.int8),
            "'a': reduce_dtype=torch.int8 cannot add float32 values",
        ),
        (
            lambda a, b: GradientBuckets([("a", nn.Parameter(a.to("meta")))], SingleCommunicator()),
            "'a' is on meta, the communicator works on cpu",
        ),
    ],
)
def test_what_cannot_be_planned_says_why(mistake, message):
    a, b = parameter((2,)), parameter((2,))
    with pytest.raises(UsageError, match=message):
        mistake(a, b)


# ---------------------------------------------------------------- the law


class Model(nn.Module):
    """Uses its layers in another order than it has them, one twice; some are of float16."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 1)
        self.body = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float16))
        self.stem = nn.Linear(3, 6)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.sin(torch.arange(p.numel()) + i).view(p.shape))

    def forward(self, x):
        x = torch.tanh(self.body(torch.tanh(self.body(self.stem(x)))))
        return self.head(x * self.scale.float()).square().mean()


def batch(rank, step, part):
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + part)
    return torch.randn(4, 3, generator=generator)


@settings(max_examples=7)
@given(
    parts=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    bucket_bytes=st.sampled_from([1, 60, 200, 25 << 20]),
    op=st.sampled_from([ReduceOp.AVG, ReduceOp.SUM]),
    to_none=st.booleans(),
    all_inside=st.booleans(),
)
def test_gradients_are_those_of_one_process_that_sees_all_batches(
    parts, bucket_bytes, op, to_none, all_inside
):
    size = len(parts)

    def body(comm):
        model = Model()
        buckets = GradientBuckets(model, comm, bucket_bytes=bucket_bytes, op=op)
        found = []
        for step in range(3):
            model.zero_grad(set_to_none=to_none)
            inside = parts[comm.rank] - (not all_inside)
            with buckets.accumulate():
                for part in range(inside):
                    model(batch(comm.rank, step, part)).backward()
            if not all_inside:
                model(batch(comm.rank, step, inside)).backward()
            buckets.finish()
            found.append([p.grad.clone() for p in model.parameters()])
        return found

    results = LocalWorld(size).run(body)

    serial = Model()
    for step in range(3):
        serial.zero_grad()
        for rank, count in enumerate(parts):
            for part in range(count):
                loss = serial(batch(rank, step, part))
                (loss / size if op is ReduceOp.AVG else loss).backward()
        for result in results:
            for mine, one, p in zip(
                result[step], results[0][step], serial.parameters(), strict=True
            ):
                assert torch.equal(mine, one)
                # Up to 12 terms, each rounded to the dtype when it is added up.
                close = 12 * torch.finfo(p.dtype).eps * max(1.0, p.grad.abs().max().item())
                torch.testing.assert_close(mine, p.grad, rtol=0, atol=close)


def test_half_precision_averages_neither_overflow_nor_vanish():
    def body(comm):
        found = []
        for values in ([30000.0], [2.0**-24], [30000.0, 2.0**-24]):
            weight = parameter((len(values),), torch.float16)
            buckets = GradientBuckets([("weight", weight)], comm)
            (weight * torch.tensor(values, dtype=torch.float16)).sum().backward()
            buckets.finish()
            found.append(weight.grad.tolist())
        return found

    assert LocalWorld(4).run(body) == [[[30000.0], [2.0**-24], [30000.0, 2.0**-24]]] * 4


# ---------------------------------------------------------------- launching


def test_a_bucket_is_under_way_while_the_backward_still_runs():
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    comm = SpyCommunicator(SingleCommunicator())
    buckets = GradientBuckets(model, comm, bucket_bytes=2 * 64)
    comm.asked.clear()
    seen = []
    model[0].weight.register_hook(lambda grad: seen.append(list(comm.asked)))

    model(torch.ones(1, 4)).sum().backward()

    assert seen == [[32]]
    assert comm.asked == [32, 32]
    buckets.finish()
    assert comm.asked == [32, 32, 5]  # and who has used which of the four


def test_ranks_whose_gradients_come_in_other_orders_reduce_in_the_order_of_rank_0():
    def body(comm):
        p = {name: parameter((n,)) for n, name in enumerate("abcd", 1)}
        spy = SpyCommunicator(comm)
        buckets = GradientBuckets(p.items(), spy, bucket_bytes=4)
        order = ["c", "a", "d", "b"] if comm.rank == 0 else ["b", "d", "c", "a"]
        for _ in range(2):
            spy.asked.clear()
            # What was computed last comes first.
            terms = [
                p[name].sum() * (10 * place + comm.rank)
                for place, name in reversed(list(enumerate(order)))
            ]
            sum(terms).backward()
            buckets.finish()
        return buckets.plan.names, spy.asked, [q.grad.mean().item() for q in p.values()]

    results = LocalWorld(2).run(body)

    names, asked = ("c", "a", "d", "b"), [3, 1, 4, 2, 5]
    assert results == [(names, asked, [41.0, 31.0, 21.0, 31.0])] * 2


def test_later_backwards_follow_the_order_in_which_the_first_ones_gradients_came():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(2, 2, bias=False)
            self.first = nn.Linear(2, 2, bias=False)

        def forward(self, x):
            return self.last(self.first(x)).sum()

    model = Backwards()
    comm = SpyCommunicator(SingleCommunicator())
    buckets = GradientBuckets(model, comm, bucket_bytes=16)
    began = []
    model.first.weight.register_hook(lambda grad: began.append(comm.asked.count(4)))

    for _ in range(2):
        model(torch.ones(1, 2)).backward()
        buckets.finish()

    assert began == [0, 3]  # in the second step one of two goes before
    assert buckets.plan.names == ("last.weight", "first.weight")


def test_a_parameter_of_a_started_bucket_has_no_gradient_until_it_is_finished():
    def body(comm):
        p = scalars("a", "b")
        buckets = GradientBuckets(p.items(), comm, bucket_bytes=4)
        (p["a"] + p["b"]).backward()
        while_under_way = grads(p)
        buckets.finish()
        return while_under_way, grads(p)

    assert LocalWorld(2).run(body) == [([None, None], [1.0, 1.0])] * 2


def test_a_step_sends_each_gradient_once():
    def body(comm):
        model = nn.Linear(100, 30)
        recorded = Recorded(comm)
        buckets = GradientBuckets(model, recorded, bucket_bytes=4000)
        model(torch.ones(1, 100)).sum().backward()
        buckets.finish()
        before = recorded.traffic
        model(torch.ones(1, 100)).sum().backward()
        buckets.finish()
        return (recorded.traffic - before)["all_reduce"], buckets.plan

    for flow, plan in LocalWorld(2).run(body):
        assert flow.operations == len(plan.buckets) + 1
        assert flow.bytes_in == plan.num_bytes + 4 * 3
        assert plan.num_bytes == 4 * 3030


def test_gradients_may_travel_compressed():
    class Compressed(SpyCommunicator):
        def all_reduce(self, tensor, op=ReduceOp.SUM, **options):
            if not tensor.is_floating_point():
                return self._comm.all_reduce(tensor, op)
            return compressed_all_reduce(self._comm, tensor, BlockInt8(8), op)

    def body(comm):
        model = nn.Linear(9, 5)
        buckets = GradientBuckets(model, Compressed(comm), bucket_bytes=100)
        for _ in range(2):
            model.zero_grad()
            x = batch(comm.rank, 0, 0).repeat(1, 3)
            model(x).sum().backward()
            buckets.finish()
        return model.weight.grad.clone()

    first, second = LocalWorld(2).run(body)

    assert torch.equal(first, second)
    exact = sum(batch(rank, 0, 0).repeat(1, 3).sum(0) for rank in range(2)) / 2
    # Both contributions and their sum are below 8, and off by at most 8 / 254.
    torch.testing.assert_close(first, exact.expand(5, 9), rtol=0, atol=2 * 8 / 254)


def test_a_rank_that_does_not_come_to_finish_is_told_at_the_timeout():
    def body(comm):
        p = scalars("a")
        buckets = GradientBuckets(p.items(), comm)
        if comm.rank == 0:
            p["a"].backward()
            with pytest.raises(CollectiveTimeoutError):
                buckets.finish(timeout_s=0.1)

    LocalWorld(2).run(body)


# ---------------------------------------------------------------- accumulating


def test_gradients_that_are_there_already_are_taken_over():
    p = scalars("a")
    p["a"].grad = torch.tensor(3.0)
    buckets = GradientBuckets(p.items(), SingleCommunicator())

    p["a"].backward()
    buckets.finish()

    assert grads(p) == [4.0]


def test_a_parameter_used_only_in_an_earlier_backward_is_averaged_too():
    def body(comm, allow_unused):
        p = scalars("a", "b")
        buckets = GradientBuckets(p.items(), comm, allow_unused=allow_unused)
        with buckets.accumulate():
            ((comm.rank + 1) * p["a"]).backward()
        ((comm.rank + 1) * p["b"]).backward()
        buckets.finish()
        return grads(p)

    for allow_unused in (False, True):
        assert LocalWorld(2).run(body, allow_unused) == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("rebuilt_after", [0, 1, 2, 3])
def test_rebuilding_in_the_middle_of_accumulation_keeps_what_has_been_accumulated(
    size, rebuilt_after
):
    def body(comm):
        p = scalars("a", "b")
        buckets = GradientBuckets(p.items(), comm, bucket_bytes=4)
        found = []
        for _ in range(2):
            for number, value in enumerate((1.0, 2.0, 4.0), 1):
                with buckets.accumulate():
                    (value * p["a"] + 10 * value * p["b"]).backward()
                if number == rebuilt_after:
                    order = list(reversed(buckets.plan.names))
                    buckets.rebuild(order)
                    assert buckets.plan.names == tuple(order)
            buckets.finish()
            found.append(grads(p))
            flat = {q.grad.untyped_storage().data_ptr() for q in p.values()}
            again = {m.place.untyped_storage().data_ptr() for m in buckets._members.values()}
            assert flat == again
            for q in p.values():
                q.grad = None
        return found

    assert LocalWorld(size).run(body) == [[[7.0, 70.0], [7.0, 70.0]]] * size


def test_an_order_of_ones_own_stays_until_that_of_arrival_is_asked_for_again():
    def body(comm):
        p = scalars("a", "b", "c")
        buckets = GradientBuckets(p.items(), comm)
        seen = []
        for order in ("bca", None, "abc"):
            if order is not None:
                buckets.rebuild(list(order))
            for name in "bac" if comm.rank else "cba":
                p[name].backward()
            buckets.finish()
            seen.append("".join(buckets.plan.names))
            if order is None:
                buckets.rebuild()
                seen.append("".join(buckets.plan.names))
        buckets.rebuild()
        return [*seen, "".join(buckets.plan.names)]

    assert LocalWorld(2).run(body) == [["bca", "bca", "cba", "abc", "cba"]] * 2


def test_gradients_may_be_replaced_set_to_none_and_zeroed_at_any_time():
    def body(comm):
        p = scalars("a")
        a = p["a"]
        buckets = GradientBuckets(p.items(), comm)
        found = []
        for change in ("nothing", "replace", "none", "zero", "by hand"):
            a.grad = None
            with buckets.accumulate():
                (a * (comm.rank + 1)).backward()  # 1 and 2
                if change == "replace":
                    a.grad = torch.tensor(10.0)
                elif change == "none":
                    a.grad = None
                elif change == "zero":
                    a.grad.zero_()
                (a * 4).backward()
            if change == "by hand":
                a.grad = torch.tensor(100.0 * comm.rank)
            buckets.finish()
            assert buckets._members["a"].is_linked
            found.append(a.grad.item())
        return found

    assert LocalWorld(2).run(body) == [[5.5, 14.0, 4.0, 4.0, 50.0]] * 2


@pytest.mark.parametrize(
    "take_away",
    [
        lambda layer: setattr(layer.weight.grad, "data", layer.weight.grad.data.mul(0)),
        lambda layer: layer.to(memory_format=torch.channels_last).zero_grad(set_to_none=False),
    ],
    ids=["assignment to data", "another memory format"],
)
def test_gradients_whose_memory_is_taken_out_of_the_bucket_are_reduced_all_the_same(take_away):
    def body(comm):
        layer = nn.Conv2d(2, 1, 2, bias=False)
        buckets = GradientBuckets(layer, comm)
        for _ in range(2):
            layer(torch.full((1, 2, 2, 2), float(comm.rank))).sum().backward()
            buckets.finish()
            reduced = layer.weight.grad.unique().tolist()
            take_away(layer)
        return reduced

    assert LocalWorld(2).run(body) == [[0.5]] * 2


def test_a_gradient_that_is_another_view_of_its_own_memory_is_taken_by_value():
    turned, conjugate = parameter((3, 3)), parameter(2, torch.complex64)
    buckets = GradientBuckets([("a", turned), ("b", conjugate)], SingleCommunicator())
    rows = torch.arange(9.0).view(3, 3)
    with buckets.accumulate():
        ((turned * rows).sum() + (conjugate * (3 - 4j)).real.sum()).backward()

    turned.grad = turned.grad.mT
    conjugate.grad = conjugate.grad.conj()
    given = conjugate.grad.tolist()
    buckets.finish()

    assert torch.equal(turned.grad, rows.mT)
    assert conjugate.grad.tolist() == given


def test_several_backwards_may_complete_a_bucket_together():
    p = scalars("a", "b")
    buckets = GradientBuckets(p.items(), SingleCommunicator())

    for name in ("a", "a", "b"):
        p[name].backward()
    buckets.finish()

    assert grads(p) == [2.0, 1.0]


def test_averages_that_are_kept_over_a_finish_go_on():
    def body(comm):
        p = scalars("a")
        buckets = GradientBuckets(p.items(), comm)
        for _ in range(3):
            (p["a"] * (comm.rank + 1)).backward()
            buckets.finish()
        return grads(p)

    assert LocalWorld(2).run(body) == [[4.5]] * 2


# ---------------------------------------------------------------- unused parameters


def train_one_step(comm, allow_unused):
    p = scalars("a", "b")
    buckets = GradientBuckets(p.items(), comm, allow_unused=allow_unused)
    ((comm.rank + 1) * p["a"]).backward()
    try:
        buckets.finish()
    except UnusedParameterError as error:
        return str(error), error.names, grads(p)
    return [0.0 - p["a"].grad.item(), p["b"].grad]


def test_a_parameter_without_gradient_raises_in_the_same_step_on_every_rank():
    told = LocalWorld(2).run(train_one_step, False)

    assert told[0] == told[1]
    assert told[0][1:] == (("b",), [None, None])
    assert told[0][0].startswith("no gradient since the last finish() for b (on every rank). Use")


def test_where_unused_parameters_are_allowed_the_others_are_averaged_all_the_same():
    assert LocalWorld(2).run(train_one_step, True) == [[-1.5, None]] * 2


def test_a_parameter_that_some_ranks_do_not_use_counts_as_zero_there_or_is_named_with_them():
    def body(comm, allow_unused):
        p = scalars("a", "b", "c")
        buckets = GradientBuckets(p.items(), comm, bucket_bytes=4, allow_unused=allow_unused)
        (8 * (p["a"] + p["b"] + p["c"])).backward()
        buckets.finish()
        for q in p.values():
            q.grad = None
        if comm.rank == 0:
            (3 * p["a"] + 3 * p["b"]).backward()
        elif comm.rank == 1:
            (3 * p["b"]).backward()
        if allow_unused:
            buckets.finish()
            return grads(p)
        with pytest.raises(UnusedParameterError) as caught:
            buckets.finish()
        (p["a"] + p["b"] + p["c"]).backward()
        buckets.finish()
        assert grads(p) == [1.0, 1.0, 1.0]
        return str(caught.value)

    assert LocalWorld(3).run(body, True) == [[1.0, 2.0, None]] * 3
    for text in LocalWorld(3).run(body, False):
        assert "for a (on ranks 1-2), b (on rank 2), c (on every rank). Use" in text


def test_a_backward_that_gives_none_is_no_use_and_holds_nobody_up():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    def body(comm):
        p = scalars("a", "b")
        spy = SpyCommunicator(comm)
        buckets = GradientBuckets(p.items(), spy)
        (p["a"] + Nothing.apply(p["b"])).backward()
        assert spy.asked[-1] == 2  # it is under way already
        with pytest.raises(UnusedParameterError, match=r"for b \(on every rank\)"):
            buckets.finish()

    LocalWorld(2).run(body)


def test_zeroed_gradients_of_an_earlier_step_are_no_use():
    p = scalars("a", "b")
    buckets = GradientBuckets(p.items(), SingleCommunicator())
    (p["a"] + p["b"]).backward()
    buckets.finish()
    for q in p.values():
        q.grad.zero_()

    p["a"].backward()

    with pytest.raises(UnusedParameterError) as caught:
        buckets.finish()
    assert caught.value.names == ("b",)


# ---------------------------------------------------------------- mistakes


def late(p, comm, buckets):
    p["a"].backward()
    if comm.rank == 1:
        p["a"].backward()


def sparse(p, comm, buckets):
    table = nn.functional.embedding(torch.tensor([0]), p["a"].view(1, 1), sparse=True)
    table.sum().backward()


def convert(p, comm, buckets):
    if comm.rank == 1:
        p["a"].data = torch.zeros(3, dtype=torch.float64)
    p["a"].sum().backward()
    p["a"].grad = None
    p["a"].data = torch.tensor(0.0)


def frozen(p, comm, buckets):
    p["a"].backward()
    p["frozen"].requires_grad_(comm.rank == 1)


def create_graph(p, comm, buckets):
    (p["a"] ** 2).backward(create_graph=comm.rank == 1)


def graph_by_hand(p, comm, buckets):
    p["a"].backward()
    buckets.finish()
    if comm.rank == 1:
        p["a"].grad = p["a"].grad * p["a"]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (create_graph, "rank 1: a got a gradient that is part of a graph"),
        (graph_by_hand, "rank 1: a got a gradient that is part of a graph"),
        (late, "rank 1: a got a gradient after its bucket had been started"),
        (convert, r"rank 1: a got a gradient float64\[3\] and has room for float32\[\]"),
        (frozen, "rank 1: frozen was frozen and is trained now"),
    ],
)
def test_a_mistake_of_one_rank_raises_on_all_and_leaves_no_gradient(mistake, message):
    def body(comm):
        p = scalars("a", "frozen")
        p["frozen"].requires_grad_(False)
        buckets = GradientBuckets(p.items(), comm)
        mistake(p, comm, buckets)
        with pytest.raises(UsageError, match=message) as caught:
            buckets.finish()
        assert grads(p) == [None, None]
        p["frozen"].requires_grad_(False)
        (p["a"] * 2).backward()
        buckets.finish()
        assert grads(p) == [2.0, None]
        return str(caught.value)

    assert len(set(LocalWorld(2).run(body))) == 1


def test_a_timeout_that_is_none_starts_nothing():
    p = scalars("a")
    spy = SpyCommunicator(SingleCommunicator())
    buckets = GradientBuckets(p.items(), spy)
    spy.asked.clear()

    with pytest.raises(UsageError, match="finish: timeout_s=0 must be positive"):
        buckets.finish(timeout_s=0)

    assert spy.asked == []


def test_sparse_gradients_are_refused_by_name():
    table = nn.Embedding(3, 2, sparse=True)
    buckets = GradientBuckets(table, SingleCommunicator())
    table(torch.tensor([1])).sum().backward()

    with pytest.raises(UsageError, match="rank 0: weight got a sparse gradient"):
        buckets.finish()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda rank, comm: GradientBuckets([("a", parameter((2 + rank // 2,)))], comm),
            r"rank 0 has 'a' float32\[2\], .* where rank 2 has 'a' float32\[3\]",
        ),
        (
            lambda rank, comm: GradientBuckets(scalars("a", *"b"[: rank < 2]).items(), comm),
            "rank 0 has 'b' float32.* where rank 2 has 'a' float32",
        ),
        (
            lambda rank, comm: GradientBuckets(
                scalars("a").items(), comm, op=ReduceOp.SUM if rank == 2 else ReduceOp.AVG
            ),
            "rank 0 has op=ReduceOp.AVG, .* where rank 2 has op=ReduceOp.SUM",
        ),
        (
            lambda rank, comm: (
                GradientBuckets(scalars("a") if rank == 2 else nn.Linear(1, 1), comm)
                if rank != 2
                else GradientBuckets([("a", torch.ones(1))], comm)
            ),
            "rank 2 GradientBuckets: no parameter is trained",
        ),
        (
            lambda rank, comm: GradientBuckets(
                [parameter((1,))] if rank == 2 else nn.Linear(1, 1), comm
            ),
            r"rank 2 .*: pass a module or its named_parameters\(\), .* got a Parameter",
        ),
        (
            lambda rank, comm: GradientBuckets([("a", 1 if rank == 2 else parameter(1))], comm),
            r"rank 2 .*: pass a module or its named_parameters\(\)",
        ),
        (
            lambda rank, comm: GradientBuckets(3 if rank == 2 else nn.Linear(1, 1), comm),
            r"rank 2 .*: pass a module or its named_parameters\(\), got 3",
        ),
        (
            lambda rank, comm: GradientBuckets(
                nn.Linear(1, 1), comm, bucket_bytes=None if rank == 2 else 1 << 20
            ),
            "rank 2 .*: bucket_bytes=None must be a positive number",
        ),
        (
            lambda rank, comm: GradientBuckets(nn.Linear(1, 1), comm).rebuild(
                3 if rank == 2 else ["weight", "bias"]
            ),
            "rank 2 rebuild: order must be a list of names, got 3",
        ),
        (
            lambda rank, comm: GradientBuckets(
                nn.Linear(1, 1), comm, reduce_dtype="float32" if rank == 2 else None
            ),
            "rank 2 .*: reduce_dtype must be a torch.dtype or None, got 'float32'",
        ),
        (
            lambda rank, comm: GradientBuckets([("a", with_wide_gradients())], comm),
            "ranks 0-2 .*'a' is torch.bfloat16 and its grad_dtype torch.float32",
        ),
    ],
)
def test_what_differs_between_ranks_is_told_on_every_rank(make, message):
    def body(comm):
        with pytest.raises(UsageError, match=message):
            make(comm.rank, comm)

    LocalWorld(3).run(body)


def test_a_guarded_optimizer_does_not_step_before_finish():
    p = scalars("a")
    buckets = GradientBuckets(p.items(), SingleCommunicator())
    optimizer = torch.optim.SGD(p.values(), lr=1.0)
    handle = buckets.guard(optimizer)

    with buckets.accumulate():
        p["a"].backward()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"step\(\) before finish\(\)"):
            optimizer.step()
        p["a"].backward()

    with pytest.raises(UsageError, match="rebuild: reductions are under way"):
        buckets.rebuild()
    with pytest.raises(UsageError, match="after its bucket had been started"):
        buckets.finish()
    p["a"].backward()
    buckets.finish()
    optimizer.step()
    assert p["a"].item() == -1.0
    handle.remove()
    p["a"].backward()
    optimizer.step()


def test_buckets_live_where_the_communicator_wants_them_and_go_with_the_last_reference():
    comm = SpyCommunicator(SingleCommunicator())
    model = nn.Linear(2, 2)
    buckets = GradientBuckets(model, comm)
    assert comm.asked == ["memory"]
    buckets.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert comm.asked == ["memory"]
    assert "2 parameters in 1 buckets, 24 bytes, AVG over" in repr(buckets)

    gone = weakref.ref(buckets)
    del buckets
    gc.collect()

    assert gone() is None


def test_a_new_layout_takes_the_memory_of_one_more_bucket():
    comm = SpyCommunicator(SingleCommunicator())
    alive = []

    def empty(shape, *, dtype):
        memory = np.empty(shape, dtype=np.float32)
        alive.append(len([1 for other in seen if other() is not None]))
        seen.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    seen = []
    comm.empty = empty
    p = scalars(*"abcdefgh")
    buckets = GradientBuckets(p.items(), comm, bucket_bytes=4)
    with buckets.accumulate():
        sum(q * n for n, q in enumerate(p.values())).backward()

    buckets.rebuild("badcfehg")

    assert alive == [*range(8), *[8] * 8]
    assert grads(p) == [float(n) for n in range(8)]
