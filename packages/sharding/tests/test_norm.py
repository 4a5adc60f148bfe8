"""The one norm: every element of the plain model counts once, in every layout."""

import math

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld, ReduceOp, ShardSpec, SingleCommunicator
from trainwright.sharding import (
    Mesh,
    MeshShape,
    ShardingError,
    largest_magnitude,
    non_finite_count,
    one_norm,
    power_sum,
    square_sum,
)
from trainwright.sharding.testing import mesh_shapes


@attrs.frozen(eq=False)
class Held:
    """A piece: a gradient and where it lies."""

    parameter: torch.Tensor
    spec: ShardSpec


def held(values, replicated=(), name="w"):
    gradient = torch.as_tensor(values, dtype=torch.float32)
    parameter = torch.zeros_like(gradient)
    parameter.grad = gradient
    return Held(parameter, ShardSpec.full(name, gradient.shape, replicated))


def norms(shape, pieces_of, **options):
    """Run one_norm on every rank with the pieces that ``pieces_of(coordinates)`` gives."""

    def run(world):
        mesh = Mesh(world, shape)
        return one_norm(mesh, pieces_of(mesh.coordinates), **options)

    return [totals.norm.item() for totals in LocalWorld(shape.world_size).run(run)]


class Counting:
    """A communicator that notes the calls it passes on."""

    def __init__(self, comm):
        self.comm = comm
        self.calls = []

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def all_reduce(self, tensor, op=ReduceOp.SUM, **options):
        self.calls.append((op, tensor.dtype, tensor.numel()))
        return self.comm.all_reduce(tensor, op, **options)


def test_replicated_weights_count_once_and_shards_all():
    # SHD-01: replicated [3], shards [4] and [0].
    found = norms(MeshShape(tp=2), lambda at: [held([3.0], ["tp"]), held([4.0 * (at["tp"] == 0)])])

    assert found == [5.0, 5.0]


def test_a_tied_copy_on_the_last_stage_counts_once():
    # SHD-02: both copies are 8 values of 10.
    found = norms(MeshShape(pp=2), lambda at: [held([10.0] * 8, ["pp"])])

    assert found == pytest.approx([math.sqrt(800)] * 2)


def test_unsharded_gradients_do_not_grow_with_the_world():
    # SHD-08: replicated [3, 4] on four ranks; then also shards [0], [1], [2], [3].
    alone = norms(MeshShape(dp=4), lambda at: [held([3.0, 4.0], ["dp"])])
    mixed = norms(MeshShape(dp=4), lambda at: [held([3.0, 4.0], ["dp"]), held([at["dp"]])])

    assert alone == [5.0] * 4
    assert mixed == pytest.approx([math.sqrt(39)] * 4)


def test_empty_shards_add_nothing_and_join():
    # SHD-19: (2, 3) with values 1..6 over four ranks, of which two are empty.
    rows = {0: [[1.0, 2.0, 3.0]], 1: [[4.0, 5.0, 6.0]]}

    def pieces_of(at):
        return [held(rows.get(at["dp"], torch.zeros(0, 3)))]

    assert norms(MeshShape(dp=4), pieces_of) == pytest.approx([math.sqrt(91)] * 4)
    assert norms(MeshShape(dp=4), pieces_of, p=math.inf) == [6.0] * 4


@pytest.mark.parametrize(("p", "expected"), [(2.0, 5.0), (math.inf, 4.0), (1.0, 7.0)])
def test_the_norm_is_over_all_stages_and_of_the_order_asked_for(p, expected):
    # SHD-23: stage gradients [3] and [-4]; a third stage has none and joins.
    stages = {0: [held([3.0])], 1: [held([-4.0])], 2: []}

    assert norms(MeshShape(pp=3), lambda at: stages[at["pp"]], p=p) == pytest.approx([expected] * 3)


@given(st.data(), mesh_shapes(max_world_size=8), st.sampled_from([1.0, 2.0, 3.0, math.inf]))
def test_the_norm_of_any_layout_is_that_of_the_plain_model(data, shape, p):
    axes = ("dp", "cp", "tp")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    whole = [torch.randn(24, 24, generator=generator) for _ in range(shape.pp * 2)]
    cut = [[axis for axis in axes if data.draw(st.booleans())] for _ in whole]

    def pieces_of(at):
        found = []
        for index in range(at["pp"], len(whole), shape.pp):
            part = whole[index].reshape(-1)
            for axis in cut[index]:
                part = part.tensor_split(shape.size(axis))[at[axis]]
            found.append(held(part, [axis for axis in axes if axis not in cut[index]]))
        return found

    expected = torch.stack(whole).double().norm(p).item()
    assert norms(shape, pieces_of, p=p) == pytest.approx([expected] * shape.world_size, rel=1e-6)


def test_one_sum_over_the_world_carries_everything():
    def run(world):
        counting = Counting(world)
        mesh = Mesh(counting, MeshShape(pp=2, dp=2, tp=2))
        last = mesh.coordinate("pp") == 1
        totals = one_norm(
            mesh,
            [held([1.0, math.nan, -math.inf], ["dp"])],
            loss_sum=torch.tensor(2.5 if last else 0.0, requires_grad=True),
            tokens=torch.tensor(8 if last else 0),
            verdict=1 if world.rank == 3 else 0,
        )
        return counting.calls, totals

    for calls, totals in LocalWorld(8).run(run):
        assert calls == [(ReduceOp.SUM, torch.float64, 8)]
        assert totals.loss_sum.item() == 5.0
        assert totals.tokens.item() == 16.0
        assert totals.non_finite.item() == 8.0
        assert totals.verdicts.tolist() == [7.0, 1.0, 0.0, 0.0]
        assert not math.isfinite(totals.norm.item())
        assert not totals.loss_sum.requires_grad


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_anywhere_makes_the_norm_not_finite_on_every_rank(p, bad):
    found = norms(MeshShape(dp=2), lambda at: [held([1.0, bad if at["dp"] else 2.0])], p=p)

    assert not any(map(math.isfinite, found))


def test_gradients_that_are_none_are_zero_and_no_pieces_are_fine():
    nothing = Held(torch.zeros(3), ShardSpec.full("w", (3,)))
    mesh = Mesh(SingleCommunicator(), MeshShape())

    totals = one_norm(mesh, [nothing])

    assert [t.item() for t in (totals.norm, totals.non_finite)] == [0.0, 0.0]
    assert one_norm(mesh, [], p=math.inf).norm.item() == 0.0


def test_a_gradient_of_another_size_than_its_piece_is_refused():
    wrong = attrs.evolve(held([1.0, 2.0]), spec=ShardSpec.full("layer.w", (3,)))

    with pytest.raises(ShardingError, match=r"layer\.w: the gradient has 2 elements, the piece 3"):
        one_norm(Mesh(SingleCommunicator(), MeshShape()), [wrong])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 0.0}, "p must be positive"),
        ({"p": -1.0}, "p must be positive"),
        ({"p": math.nan}, "p must be positive"),
        ({"verdict": 4}, r"verdict must be in 0\.\.3, got 4"),
        ({"verdict": -1}, "verdict must be in"),
    ],
)
def test_orders_and_verdicts_out_of_range_are_refused(options, message):
    with pytest.raises(ShardingError, match=message):
        one_norm(Mesh(SingleCommunicator(), MeshShape()), [], **options)


@pytest.mark.parametrize("value", [1e-3, 0.1, 0.3, 0.9, 1.3])
def test_millions_of_equal_elements_lose_no_digits(value):
    # A running float32 sum of them loses three digits and more; the law needs 1e-5 of the norm.
    gradient = torch.full((3_000_001,), value)

    exact = gradient[0].double().square().item() * gradient.numel()

    assert square_sum([gradient]).item() == pytest.approx(exact, rel=4e-6)


def test_many_random_elements_agree_with_float64():
    gradient = torch.randn(2_000_003, generator=torch.Generator().manual_seed(0)) + 1

    exact = gradient.double()

    assert square_sum([gradient]).item() == pytest.approx(exact.square().sum().item(), rel=1e-7)
    assert power_sum([gradient], 3.0).item() == pytest.approx(
        exact.abs().pow(3).sum().item(), rel=2e-6
    )


@given(
    st.lists(st.sampled_from([(), (0,), (1,), (1023,), (1024,), (1025,), (3, 700)]), max_size=4),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([1.0, 2.0, 2.5]),
)
def test_sums_over_any_shapes_and_dtypes_agree_with_float64(shapes, dtype, p):
    generator = torch.Generator().manual_seed(len(shapes))
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    flat = torch.cat([torch.zeros(1), *(tensor.double().reshape(-1) for tensor in tensors)])

    # A row of 1024 is off by ten roundings of a sum by pairs and a few of the powers, its p-th
    # power by p times as many.
    tight = 1e-12 if dtype == torch.float64 else 16 * p * torch.finfo(torch.float32).eps
    assert power_sum(tensors, p).item() == pytest.approx(flat.abs().pow(p).sum().item(), rel=tight)
    assert largest_magnitude(tensors).item() == flat.abs().max().item()
    assert non_finite_count(tensors).item() == 0.0


def test_float64_is_summed_in_float64_and_float32_on_request():
    values = torch.full((4096,), 1 + 2.0**-30, dtype=torch.float64)

    exact = values.square().sum().item()

    assert square_sum([values]).item() == pytest.approx(exact, rel=1e-15)
    large = torch.full((10,), 1e30)
    assert math.isinf(square_sum([large]).item())
    assert square_sum([large], dtype=torch.float64).item() == pytest.approx(1e61, rel=1e-6)


def test_squares_that_overflow_are_not_counted_as_bad_elements():
    assert non_finite_count([torch.full((2000,), 1e30)]).item() == 0.0
    totals = one_norm(Mesh(SingleCommunicator(), MeshShape()), [held([1e30] * 3)])
    assert totals.non_finite.item() == 0.0


def test_bad_elements_are_counted_one_by_one():
    values = torch.ones(5000)
    values[[0, 1024, 4999]] = torch.tensor([math.nan, math.inf, -math.inf])

    assert non_finite_count([values, torch.ones(3), values[4999:]]).item() == 4.0


def test_the_last_of_millions_of_elements_is_counted_too():
    values = torch.zeros((1 << 22) + 2)
    values[-1] = math.inf

    assert non_finite_count([values]).item() == 1.0


def test_strided_gradients_are_read_right():
    values = torch.arange(60.0).view(6, 10)

    assert square_sum([values.t(), values[:, ::2]]).item() == pytest.approx(
        values.square().sum().item() + values[:, ::2].square().sum().item()
    )


def test_sums_never_wait_for_the_device():
    # On the meta device every attempt to read a value raises.
    gradients = [torch.ones(5000, device="meta"), torch.ones((), device="meta")]

    assert square_sum(gradients).device.type == "meta"
    assert non_finite_count(gradients).device.type == "meta"
    assert largest_magnitude([], device="meta").device.type == "meta"


def test_powers_that_are_not_finite_and_positive_are_refused():
    with pytest.raises(ShardingError, match="inf is largest_magnitude"):
        power_sum([], math.inf)
