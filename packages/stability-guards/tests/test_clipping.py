"""Clipping equals torch's where the norm is finite, and touches nothing where it is not."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import LocalWorld
from trainwright.stability_guards import (
    GuardError,
    NonFiniteGradientError,
    clip_,
    clip_coefficient,
    clip_grad_norm_,
    global_norm,
    non_finite_names,
)

NORM_TYPES = [2.0, 1.0, 3.0, 0.5, math.inf]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def parameter(values, dtype=torch.float32):
    weight = nn.Parameter(torch.zeros_like(torch.as_tensor(values, dtype=dtype)))
    weight.grad = torch.as_tensor(values, dtype=dtype).clone()
    return weight


def drawn_gradients(seed, shapes, scale):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) * scale for shape in shapes
    ]


shapes = st.lists(
    st.lists(st.integers(0, 4), max_size=2).map(tuple), min_size=1, max_size=4
).filter(lambda found: any(math.prod(shape) for shape in found))
scales = st.sampled_from([1e-4, 1.0, 1e3])


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@given(
    seed=st.integers(0, 999),
    shapes=shapes,
    scale=scales,
    dtype=st.sampled_from(DTYPES[:2]),
    max_norm=st.sampled_from([0.1, 1.0, 1e6, math.inf]),
)
def test_clipping_on_one_process_equals_torchs(norm_type, seed, shapes, scale, dtype, max_norm):
    gradients = drawn_gradients(seed, shapes, scale)
    ours = [parameter(gradient, dtype) for gradient in gradients]
    theirs = [parameter(gradient, dtype) for gradient in gradients if gradient.numel()]

    norm = clip_grad_norm_(ours, max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)

    # Both sum at most 64 terms and take one root; p < 1 raises the error to 1/p.
    tolerance = 64 * torch.finfo(dtype).eps * max(1.0, 1.0 / norm_type)
    assert norm.dtype == expected.dtype
    assert math.isclose(norm.item(), expected.item(), rel_tol=tolerance)
    for mine, yours in zip([p for p in ours if p.numel()], theirs, strict=True):
        assert torch.allclose(mine.grad, yours.grad, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@given(
    seed=st.integers(0, 999),
    shapes=shapes,
    scale=scales,
    world=st.integers(1, 4),
    cut=st.integers(0, 10),
)
def test_clipping_over_shards_equals_clipping_the_whole(norm_type, seed, shapes, scale, world, cut):
    gradients = drawn_gradients(seed, shapes, scale)
    whole = [parameter(gradient, torch.float64) for gradient in gradients]
    shared = drawn_gradients(seed + 1, [(3,)], scale)[0]
    shared_whole = parameter(shared, torch.float64)
    expected = clip_grad_norm_([*whole, shared_whole], 1.0, norm_type)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    bounds = [0, *sorted((cut * (r + 3)) % (len(flat) + 1) for r in range(world - 1)), len(flat)]

    def clip(communicator):
        first, last = bounds[communicator.rank : communicator.rank + 2]
        mine = parameter(flat[first:last], torch.float64)
        replica = parameter(shared, torch.float64)
        norm = clip_grad_norm_(
            [mine, replica],
            1.0,
            norm_type,
            communicator=communicator,
            sharded=lambda p: p is not replica,
        )
        return norm, mine.grad, replica.grad

    results = LocalWorld(world).run(clip)

    joined = torch.cat([shard for _, shard, _ in results])
    expected_flat = torch.cat([p.grad.flatten() for p in whole])
    assert torch.allclose(joined, expected_flat, rtol=1e-10, atol=0.0)
    for norm, _, replica in results:
        assert math.isclose(norm.item(), expected.item(), rel_tol=1e-10)
        assert torch.allclose(replica, shared_whole.grad, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 5.0), (math.inf, 4.0), (1.0, 7.0)])
def test_stages_clip_by_one_norm_and_a_stage_without_parameters_joins(norm_type, expected):
    def clip(communicator):
        mine = [parameter([float(3 + communicator.rank)])] if communicator.rank < 2 else []
        norm = clip_grad_norm_(mine, 1.0, norm_type, communicator=communicator)
        return norm.item(), [p.grad.item() for p in mine]

    results = LocalWorld(3).run(clip)

    assert [norm for norm, _ in results] == [expected] * 3
    assert results[0][1] == pytest.approx([3.0 / expected], rel=1e-5)
    assert results[1][1] == pytest.approx([4.0 / expected], rel=1e-5)
    assert results[2][1] == []


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_norm_leaves_every_gradient_untouched_on_every_rank(bad, norm_type):
    def clip(communicator):
        mine = parameter([bad, 1.0] if communicator.rank == 1 else [3.0, 4.0])
        before = mine.grad.clone()
        norm = clip_grad_norm_([mine], 1.0, norm_type, communicator=communicator)
        return norm.item(), torch.equal(mine.grad.nan_to_num(7.0), before.nan_to_num(7.0))

    for norm, untouched in LocalWorld(3).run(clip):
        assert untouched
        assert math.isnan(norm) if math.isnan(bad) else norm == math.inf


def test_the_flag_names_only_the_parameter_that_is_not_finite():
    a, b = parameter([math.inf]), parameter([3.0])
    named = [("a", a), ("b", b)]

    with pytest.raises(NonFiniteGradientError, match=r"norm is inf: on rank 0 gradients of a$"):
        clip_grad_norm_(named, 1.0, error_if_nonfinite=True)

    assert non_finite_names(named) == ("a",)
    assert non_finite_names([a, b]) == ("parameter 0",)
    assert (a.grad.item(), b.grad.item()) == (math.inf, 3.0)


def test_every_rank_raises_where_one_ranks_gradient_is_not_finite():
    def clip(communicator):
        mine = parameter([math.nan if communicator.rank == 1 else 1.0])
        with pytest.raises(NonFiniteGradientError) as raised:
            clip_grad_norm_([("w", mine)], 1.0, error_if_nonfinite=True, communicator=communicator)
        return str(raised.value)

    messages = LocalWorld(2).run(clip)

    assert "every gradient on rank 0 is finite: another rank's" in messages[0]
    assert messages[1].endswith("on rank 1 gradients of w")


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_guarded_step_with_a_non_finite_norm_changes_no_weight(bad):
    weight = nn.Parameter(torch.tensor([5.0, 5.0]))
    weight.grad = torch.tensor([bad, 1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)

    norm = clip_grad_norm_([weight], 1.0)
    skipped = not bool(norm.isfinite())
    if not skipped:
        optimizer.step()

    assert skipped
    assert weight.tolist() == [5.0, 5.0]
    assert math.isinf(norm) if math.isinf(bad) else math.isnan(norm)


@given(
    norm=st.one_of(st.floats(0, 1e6), st.sampled_from([math.inf, math.nan])),
    max_norm=st.sampled_from([1e-3, 1.0, 50.0, math.inf]),
)
def test_the_coefficient_is_torchs_where_finite_and_one_elsewhere(norm, max_norm):
    coefficient = clip_coefficient(torch.tensor(norm, dtype=torch.float64), max_norm).item()

    expected = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0
    # torch divides by multiplying with the reciprocal: one rounding more.
    assert math.isclose(coefficient, expected, rel_tol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_that_is_known_clips_gradients_of_every_dtype(dtype):
    gradients = [torch.tensor([3.0, 0.0], dtype=dtype), torch.tensor([[4.0]])]

    untouched = clip_(gradients, torch.tensor(5.0, dtype=torch.float64), 1.0)

    assert not untouched
    assert gradients[0].dtype == dtype
    factor = 1.0 / (5.0 + 1e-6)
    eps = 2 * torch.finfo(dtype).eps  # of the coefficient, and of its product
    assert gradients[0].tolist() == pytest.approx([3.0 * factor, 0.0], rel=eps)
    assert gradients[1].item() == pytest.approx(4.0 * factor, rel=2.4e-7)


def test_narrow_gradients_are_normed_and_scaled_in_float32():
    weight = parameter([1.0] * 1000, torch.bfloat16)

    norm = clip_grad_norm_([weight], 1.0)

    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(1000**0.5, rel=1e-6)
    assert weight.grad[0].item() == torch.tensor(1 / 1000**0.5).bfloat16().item()


@pytest.mark.parametrize("dtype", DTYPES[2:])
def test_narrow_gradients_are_rounded_once_when_they_are_scaled(dtype):
    gradient = torch.linspace(0.1, 3.0, 500).to(dtype)
    norm = torch.tensor(7.7, dtype=torch.float64)
    expected = (gradient.float() * clip_coefficient(norm, 1.0).float()).to(dtype)

    clip_([gradient], norm, 1.0)

    assert torch.equal(gradient, expected)


def test_a_tied_parameter_counts_and_is_scaled_once():
    weight = parameter([3.0, 4.0])

    norm = clip_grad_norm_([("in", weight), ("out", weight)], 1.0)

    assert norm.item() == 5.0
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


def test_one_call_clips_gradients_of_mixed_dtypes():
    wide, narrow = parameter([3.0], torch.float64), parameter([4.0], torch.bfloat16)

    norm = clip_grad_norm_([wide, narrow], 1.0)

    assert norm.dtype == torch.float64
    assert norm.item() == 5.0
    assert wide.grad.item() == pytest.approx(0.6, rel=1e-5)
    assert narrow.grad.item() == pytest.approx(0.8, rel=2**-8)


def test_parameters_without_gradient_and_generators_are_fine():
    model = nn.Linear(2, 1)
    model.weight.grad = torch.tensor([[3.0, 4.0]])

    assert clip_grad_norm_(model.parameters(), 10.0).item() == 5.0
    assert model.bias.grad is None
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_(model.weight, 1.0).item() == 5.0
    assert non_finite_names(model.bias) == ()


def test_the_norm_costs_one_all_reduce():
    calls = []

    class Counting:
        rank, size, device = 0, 1, torch.device("cpu")

        def all_reduce(self, tensor, op):
            calls.append(tensor.numel() * tensor.element_size())
            return self

        def wait(self):
            pass

    for norm_type in (2.0, math.inf):
        clip_grad_norm_([parameter([1.0])] * 3, 1.0, norm_type, communicator=Counting())

    assert calls == [8, 16]


@given(values=st.lists(st.lists(st.floats(-9, 9, width=16), max_size=4), min_size=1, max_size=4))
def test_the_global_norm_is_that_of_the_joined_vector(values):
    def norm(communicator):
        mine = torch.tensor(values[communicator.rank], dtype=torch.float64)
        return [global_norm([mine], p, communicator).item() for p in (1.0, 2.0, math.inf)]

    joined = torch.tensor([x for part in values for x in part], dtype=torch.float64)
    expected = [joined.abs().sum(), joined.norm(), max([0.0, *joined.abs().tolist()])]

    for found in LocalWorld(len(values)).run(norm):
        assert found == pytest.approx([float(x) for x in expected], rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_clipping_never_makes_the_host_wait(norm_type):
    # Meta tensors have no values: reading one back raises.
    weights = [nn.Parameter(torch.ones(3, dtype=dtype, device="meta")) for dtype in DTYPES]
    for weight in weights:
        weight.grad = torch.ones_like(weight)

    norm = clip_grad_norm_(weights, 1.0, norm_type)
    untouched = clip_([weight.grad for weight in weights], norm, 1.0)

    assert norm.device.type == untouched.device.type == "meta"


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_bound_that_is_not_positive_is_refused(max_norm):
    with pytest.raises(GuardError, match=r"max_norm must be positive.*math\.inf"):
        clip_grad_norm_([parameter([1.0])], max_norm)


@pytest.mark.parametrize("norm_type", [0.0, -2.0, -math.inf, math.nan, "inf"])
def test_a_norm_type_that_is_no_norm_is_refused(norm_type):
    with pytest.raises(GuardError, match="norm_type must be positive"):
        clip_grad_norm_([parameter([1.0])], 1.0, norm_type)
