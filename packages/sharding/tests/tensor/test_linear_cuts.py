"""Linear layers under any cut compute the plain layers, and hide what they send."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.collectives import LocalWorld, differentiable, random
from trainwright.sharding import (
    ColumnParallelLinear,
    Partial,
    RowParallelLinear,
    ShardingError,
    redistribute,
)
from trainwright.sharding.data.testing import RecordingCommunicator
from trainwright.sharding.tensor import (
    Cut,
    KeyValueLinear,
    SequenceSharding,
    enter_sequence,
    join_parts,
    join_parts_for_terms,
    sum_part,
    take_part,
)
from trainwright.sharding.tensor.testing import reduce_gradients_
from trainwright.sharding.testing import (
    check_pieces_tile_the_parameters,
    load_plain_,
    mesh_of,
)

F64 = {"dtype": torch.float64}


@st.composite
def cuts(draw):
    ranks = draw(st.integers(1, 4))
    sizes = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)
    blocks = [Cut.of_sizes(draw(sizes)) for _ in range(draw(st.integers(1, 3)))]
    # PyTorch's own layer warns of no elements at all.
    return Cut.joined(*blocks) if any(block.size for block in blocks) else Cut.uneven(1, ranks)


def plain_run(inputs, outputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    plain = nn.Linear(inputs, outputs, **F64)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, generator=generator)
    input = torch.randn(2, 3, inputs, generator=generator, **F64).requires_grad_()
    upstream = torch.randn(2, 3, outputs, generator=generator, **F64)
    output = plain(input)
    output.backward(upstream)
    return plain, input, upstream, output.detach()


def assert_all_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=10)
@given(cut=cuts(), gather=st.booleans(), inputs=st.integers(1, 4))
@example(cut=Cut.uneven(2, 4), gather=True, inputs=1)
def test_a_column_layer_is_the_plain_layer_under_any_cut(cut, gather, inputs):
    plain, input, upstream, output = plain_run(inputs, cut.size)

    def build(tp):
        options = {"bias": True, "gather_output": gather, **F64}
        return ColumnParallelLinear(inputs, cut.size, tp, cut=cut, **options)

    def run(tp):
        layer = build(tp)
        load_plain_(layer, plain.state_dict(), mesh_of(tp))
        own = input.detach().clone().requires_grad_()
        found = layer(own)
        found.backward(upstream if gather else cut.take(upstream, -1, tp.rank))
        return found.detach(), own.grad, layer.weight.grad, layer.bias.grad

    check_pieces_tile_the_parameters(build, cut.num_ranks)
    for rank, (found, own, weight, bias) in enumerate(LocalWorld(cut.num_ranks).run(run)):
        assert_all_close(found, output if gather else cut.take(output, -1, rank))
        assert_all_close(own, input.grad)
        assert_all_close(weight, cut.take(plain.weight.grad, 0, rank))
        assert_all_close(bias, cut.take(plain.bias.grad, 0, rank))


@settings(max_examples=10)
@given(cut=cuts(), parallel=st.booleans(), outputs=st.integers(1, 4))
@example(cut=Cut.uneven(2, 4), parallel=False, outputs=1)
def test_a_row_layer_is_the_plain_layer_under_any_cut(cut, parallel, outputs):
    plain, input, upstream, output = plain_run(cut.size, outputs)

    def build(tp):
        options = {"bias": True, "input_is_parallel": parallel, **F64}
        return RowParallelLinear(cut.size, outputs, tp, cut=cut, **options)

    def run(tp):
        layer = build(tp)
        load_plain_(layer, plain.state_dict(), mesh_of(tp))
        own = input.detach() if not parallel else cut.take(input.detach(), -1, tp.rank)
        own = own.clone().requires_grad_()
        found = layer(own)
        found.backward(upstream)
        return found.detach(), own.grad, layer.weight.grad, layer.bias.grad

    check_pieces_tile_the_parameters(build, cut.num_ranks)
    for rank, (found, own, weight, bias) in enumerate(LocalWorld(cut.num_ranks).run(run)):
        assert_all_close(found, output)
        assert_all_close(own, cut.take(input.grad, -1, rank) if parallel else input.grad)
        assert_all_close(weight, cut.take(plain.weight.grad, 1, rank))
        assert_all_close(bias, plain.bias.grad)


@settings(max_examples=8)
@given(cut=cuts(), dim=st.integers(-2, 1))
def test_parts_become_wholes_and_wholes_parts_with_the_gradients_of_their_placement(cut, dim):
    shape = [2, 2]
    shape[dim] = cut.size
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(3), **F64)
    size = cut.num_ranks

    def run(tp):
        part = cut.take(whole, dim, tp.rank).clone().requires_grad_()
        joined = join_parts(part, tp, cut, dim)
        (once,) = torch.autograd.grad(joined, part, whole)
        for_terms = join_parts_for_terms(part, tp, cut, dim)
        (total,) = torch.autograd.grad(for_terms, part, whole)
        again = whole.clone().requires_grad_()
        taken = take_part(again, tp, cut, dim)
        (back,) = torch.autograd.grad(taken, again, taken)
        summed = sum_part(again, tp, cut, dim)
        (through,) = torch.autograd.grad(summed, again, taken)
        return joined, once, for_terms, total, taken, back, summed, through

    for rank, found in enumerate(LocalWorld(size).run(run)):
        part = cut.take(whole, dim, rank)
        expected = (whole, part, whole, size * part, part, whole, size * part, whole)
        for tensor, value in zip(found, expected, strict=True):
            assert_all_close(tensor.detach(), value)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_uneven_and_fused_layers_draw_the_values_of_the_whole_layer(size):
    half = Cut.uneven(5, size)
    cut = Cut.joined(half, half)
    expected = random.normal(random.Key(2, "w"), (10, 3), std=0.5)

    def run(tp):
        column = ColumnParallelLinear(3, 10, tp, cut=cut)
        row = RowParallelLinear(10, 3, tp, cut=cut)
        kv = KeyValueLinear(3, 10, tp, cut=cut, bias=True)
        for layer in (column, row, kv):
            layer.reset_parameters(random.Key(2, "w"), 0.5)
        return column.weight.detach(), row.weight.detach(), kv.weight.detach()

    columns, rows, wholes = zip(*LocalWorld(size).run(run), strict=True)
    assert torch.equal(cut.join(columns, 0), expected)
    assert torch.equal(cut.join(rows, 1), random.normal(random.Key(2, "w"), (3, 10), std=0.5))
    assert all(torch.equal(each, expected) for each in wholes)


class Events(TorchDispatchMode):
    """Writes products, and starts and ends of collectives, into one list."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.events.append("product")
        return func(*args, **(kwargs or {}))


class Noting:
    def __init__(self, comm, events):
        self.comm, self.events = comm, events

    def __getattr__(self, name):
        value = getattr(self.comm, name)
        if name not in ("all_reduce", "all_gather", "reduce_scatter"):
            return value

        def call(*args, **options):
            self.events.append(f"start {name}")
            work = value(*args, **options)
            wait = work.wait

            class Waiting:
                def wait(self, timeout_s=None):
                    events.append(f"end {name}")
                    wait(timeout_s)

            events = self.events
            return Waiting()

        return call


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        (None, ["start all_reduce", "product", "end all_reduce"]),
        (
            SequenceSharding.keeping_whole(0),
            ["start reduce_scatter", "product", "end reduce_scatter"],
        ),
        (
            SequenceSharding.keeping_shards(0),
            [
                "start reduce_scatter",
                "end all_gather",
                "product",
                "end reduce_scatter",
            ],
        ),
    ],
)
def test_a_column_layer_computes_its_weight_gradient_while_the_inputs_gradient_travels(
    sequence, expected
):
    def run(tp):
        events = []
        noting = Noting(tp, events)
        layer = ColumnParallelLinear(4, 4, noting, sequence=sequence)
        output = layer(torch.ones(4, 4, requires_grad=True))
        events.clear()
        with Events(events):
            output.sum().backward()
        return events

    before = ["start all_gather"] if len(expected) == 4 else []
    assert LocalWorld(2).run(run) == [[*before, "product", *expected]] * 2


@pytest.mark.parametrize("sequence", [None, SequenceSharding(0), SequenceSharding(0, True)])
@pytest.mark.parametrize(("input_grad", "weight_grad"), [(False, True), (True, False)])
def test_only_the_gradients_that_are_wanted_are_computed_and_sent(
    sequence, input_grad, weight_grad
):
    def run(tp):
        calls = []
        recording = RecordingCommunicator(tp, calls)
        layer = ColumnParallelLinear(4, 4, recording, bias=True, sequence=sequence)
        layer.requires_grad_(weight_grad)
        own = torch.ones(4, 4).requires_grad_(input_grad)
        output = layer(own)
        calls.clear()
        output.sum().backward()
        assert (own.grad is None) != input_grad
        assert (layer.weight.grad is None) != weight_grad
        return [call.operation for call in calls]

    expected = []
    if weight_grad and sequence is not None and not sequence.keeps_whole:
        expected.append("all_gather")
    if input_grad:
        expected.append("all_reduce" if sequence is None else "reduce_scatter")
    assert LocalWorld(2).run(run) == [expected] * 2


@pytest.mark.parametrize("sequence", [None, SequenceSharding(0)])
@pytest.mark.parametrize("enters", [False, True])
def test_second_derivatives_are_those_of_the_plain_layer(sequence, enters):
    plain, input, _, _ = plain_run(3, 4)
    rows = input.detach().flatten(0, 1)
    whole = rows.clone().requires_grad_()
    grad_input, grad_weight = torch.autograd.grad(
        plain(whole).pow(3).sum(), (whole, plain.weight), create_graph=True
    )
    expected = torch.autograd.grad(
        grad_input.pow(2).sum() + grad_weight.pow(2).sum(), (whole, plain.weight)
    )

    def run(tp):
        options = {"bias": True, "sequence": sequence, "input_is_entered": enters}
        layer = ColumnParallelLinear(3, 4, tp, **options, **F64)
        load_plain_(layer, plain.state_dict(), mesh_of(tp))
        cut = Cut.whole(6, 2) if sequence is None else Cut.even(6, 2)
        own = cut.take(rows, 0, tp.rank).clone().requires_grad_()
        hidden = own
        if enters and sequence is None:
            hidden = differentiable.replicate_to_partial(own, tp)
        elif enters:
            hidden = enter_sequence(own, tp, sequence)
        output = layer(hidden)
        first, of_weight = torch.autograd.grad(
            output, (own, layer.weight), 3 * output.pow(2), create_graph=True
        )
        # The loss is one number: the gradients of its terms by placement are given by hand.
        given = (2 * first, 2 * of_weight)
        return torch.autograd.grad((first, of_weight), (own, layer.weight), given)

    cut = Cut.even(4, 2)
    for rank, (own, weight) in enumerate(LocalWorld(2).run(run)):
        part = expected[0] if sequence is None else Cut.even(6, 2).take(expected[0], 0, rank)
        assert_all_close(own, part)
        assert_all_close(weight, cut.take(expected[1], 0, rank))


def test_second_derivatives_through_a_whole_input_are_refused_not_wrong():
    def run(tp):
        layer = ColumnParallelLinear(4, 4, tp, sequence=SequenceSharding(0, True))
        output = layer(torch.ones(2, 4, requires_grad=True)).square().sum()
        with pytest.raises(ShardingError, match="keeping_shards"):
            torch.autograd.grad(output, layer.weight, create_graph=True)

    LocalWorld(2).run(run)


@pytest.mark.parametrize("sequence", [None, SequenceSharding(0), SequenceSharding(0, True)])
def test_autocast_computes_in_its_dtype_and_gradients_keep_that_of_their_parameter(sequence):
    def run(tp):
        options = {"bias": True, "sequence": sequence}
        column = ColumnParallelLinear(4, 4, tp, **options)
        row = RowParallelLinear(4, 4, tp, **options)
        own = torch.ones(4, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            output = row(F.gelu(column(own)))
        assert output.dtype == torch.bfloat16
        output.float().sum().backward()
        assert own.grad.dtype == torch.float32
        assert all(p.grad.dtype == torch.float32 for p in column.parameters())
        assert all(p.grad.dtype == torch.float32 for p in row.parameters())

    LocalWorld(2).run(run)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda tp: ColumnParallelLinear(2, 5, tp, cut=Cut.even(4, 2)), "out_features is 5 over"),
        (lambda tp: ColumnParallelLinear(2, 3, tp, cut=Cut.uneven(3, 3)), "over tp=2"),
        (lambda tp: ColumnParallelLinear(2, 3, tp, cut=Cut.whole(3, 2)), "lies on one rank"),
        (lambda tp: RowParallelLinear(3, 2, tp, cut=Cut.whole(3, 2)), "in_features is 3 over"),
        (
            lambda tp: RowParallelLinear(4, 2, tp, bias=True, reduce_output=False),
            "bias would be added 2 times",
        ),
        (lambda tp: RowParallelLinear(3, 2, tp), "in_features is 3, which tp=2 does not divide"),
        (lambda tp: KeyValueLinear(2, 4, tp, cut=Cut.whole(3, 2)), "out_features is 4 over tp=2"),
        (
            lambda tp: KeyValueLinear(2, 3, tp, cut=Cut.whole(3, 2), repeats=(1, 2)),
            "computes 3 rows, which are no 2 heads",
        ),
        (lambda tp: take_part(torch.ones(3), tp, Cut.uneven(3, 3), 0), "over 3 ranks cannot"),
        (lambda tp: join_parts(torch.ones(3), tp, Cut.even(4, 2), 0), "has 2 of 4 indices"),
    ],
)
def test_a_cut_that_does_not_fit_a_layer_is_refused_on_every_rank(build, message):
    def run(tp):
        with pytest.raises(ShardingError, match=message):
            build(tp)

    LocalWorld(2).run(run)


@pytest.mark.parametrize("marks", [False, True])
def test_terms_of_a_row_layer_are_reduced_by_the_caller_and_nothing_else_if_marked(marks):
    def run(tp):
        mesh = mesh_of(tp)
        row = RowParallelLinear(4, 1, tp, reduce_output=False)
        row.marks_terms = marks
        nn.init.ones_(row.weight)
        own = torch.full((3, 2), float(tp.rank + 1), requires_grad=True)
        terms = row(own)
        if marks:
            with pytest.raises(ShardingError, match="partial over tp"):
                terms + 1.0
        total = redistribute(terms, mesh, {"tp": Partial()}, {})
        total.sum().backward()
        return total.tolist(), own.grad.tolist(), row.weight.grad.tolist()

    results = LocalWorld(2).run(run)

    assert [total for total, *_ in results] == [[[6.0]] * 3] * 2
    assert [own for _, own, _ in results] == [[[1.0, 1.0]] * 3] * 2
    assert [weight for *_, weight in results] == [[[3.0, 3.0]], [[6.0, 6.0]]]


def test_a_layer_keeps_no_copy_of_the_weight_for_key_and_value_rows():
    def run(tp):
        layer = KeyValueLinear(2, 4, tp, cut=Cut.whole(4, 2), bias=True)
        assert layer.cut.take(layer.weight, 0, tp.rank) is layer.weight
        layer(torch.ones(3, 2, requires_grad=True)).sum().backward()
        reduce_gradients_(layer, mesh_of(tp))
        return layer.weight.grad.tolist(), layer.bias.grad.tolist()

    assert LocalWorld(2).run(run) == [([[6.0, 6.0]] * 4, [6.0] * 4)] * 2
