"""16-bit weights without masters move by what their float32 updates move."""

import copy
import functools
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Box, LocalWorld, ShardSpec
from trainwright.collectives.random import Key
from trainwright.precision import (
    BlockMoments,
    KahanCompensation,
    NotAvailableError,
    PrecisionError,
    RoundedWeights,
    StochasticRounding,
    bundles,
)
from trainwright.precision.formats import BF16 as BF16_FORMAT
from trainwright.precision.formats import FP16 as FP16_FORMAT
from trainwright.precision.formats import Stochastic

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SGD = functools.partial(torch.optim.SGD, lr=1.0)
WAYS = {"stochastic": StochasticRounding(3), "kahan": KahanCompensation()}
every_way = pytest.mark.parametrize("rounding", WAYS.values(), ids=WAYS)


def optimizer_of(weight, rounding, factory=SGD, **options):
    return RoundedWeights([("w", weight)], factory, rounding=rounding, **options)


def weight_of(values, dtype=BF16):
    return nn.Parameter(torch.as_tensor(values, dtype=FP32).to(dtype))


def rounded_once(values, rounding, name="w", dtype=BF16):
    """Weights that a step of SGD from zero takes to float32 values."""
    weight = nn.Parameter(torch.zeros(values.shape, dtype=dtype))
    optimizer = RoundedWeights([(name, weight)], SGD, rounding=rounding)
    weight.grad = -values
    optimizer.step()
    return weight.detach()


def test_small_updates_reach_weights_that_nearest_rounding_leaves_where_they_are():
    weights = {name: weight_of(torch.ones(2000)) for name in WAYS}
    for name, weight in weights.items():
        optimizer = optimizer_of(weight, WAYS[name], functools.partial(torch.optim.SGD, lr=6e-4))
        for _ in range(100):
            weight.grad = torch.ones(2000)
            optimizer.step()
    bare = weight_of(torch.ones(2000))
    for _ in range(100):
        bare.data.sub_(6e-4)

    assert bare.unique().tolist() == [1.0]
    assert weights["kahan"].unique().tolist() == [0.94140625]
    # Of each step the standard deviation is at most half a spacing, of all steps ten times that.
    assert weights["stochastic"].double().mean().item() == pytest.approx(0.94, abs=1e-3)


def test_a_quarter_of_the_draws_of_a_value_at_a_quarter_go_up():
    value = 1 + 2.0**-9
    found = rounded_once(torch.full((100_000,), value), StochasticRounding(7))
    negative = rounded_once(torch.full((100_000,), -value), StochasticRounding(7))

    assert set(found.tolist()) == {1.0, 1.0078125}
    assert found.double().mean().item() == pytest.approx(value, abs=1e-4)
    assert torch.equal(negative, -found)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@every_way
def test_values_of_the_dtype_and_what_is_not_finite_are_written_as_they_are(rounding, dtype):
    values = torch.tensor([1.5, -1.5, 0.0, torch.inf, -torch.inf, torch.nan, 2.0**-20])
    for update in range(3):
        weight = nn.Parameter(torch.zeros(7, dtype=dtype))
        rounding.write(values, weight.data, torch.zeros(7, dtype=dtype), "w", update)
        torch.testing.assert_close(weight.data.float(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "format"), [(BF16, BF16_FORMAT), (FP16, FP16_FORMAT)])
def test_weights_are_the_codes_that_the_format_gives_by_the_same_draws(dtype, format):
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(0))
    values[:100] *= 1e-7
    found = rounded_once(values, StochasticRounding(5), dtype=dtype)

    codes = format.encode(values, rounding=Stochastic(Key(5, "w", 0)))

    assert torch.equal(found, format.as_torch(codes))


def test_steps_names_and_seeds_draw_apart():
    values = torch.full((1000,), 1.003)
    first = rounded_once(values, StochasticRounding(1))
    weight = nn.Parameter(torch.empty(1000, dtype=BF16))
    StochasticRounding(1).write(values, weight.data, None, "w", 1)

    for other in (
        rounded_once(values, StochasticRounding(2)),
        rounded_once(values, StochasticRounding(1), "v"),
        weight,
    ):
        assert not torch.equal(first, other)


@pytest.mark.parametrize("size", [2, 4])
def test_replicas_write_equal_weights(size):
    def train(communicator):
        weight = weight_of(torch.linspace(-1, 1, 300))
        optimizer = optimizer_of(weight, StochasticRounding(2))
        for step in range(3):
            weight.grad = torch.full((300,), 1e-3 * (communicator.rank + step))
            communicator.all_reduce(weight.grad).wait()
            optimizer.step()
        return weight.detach()

    first, *others = LocalWorld(size).run(train)
    assert all(torch.equal(first, other) for other in others)


@given(data=st.data())
def test_shards_write_what_those_parts_of_the_whole_get(data):
    rows, cols = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 9))
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows))
    col = data.draw(st.integers(1, cols - 1))
    boxes = data.draw(
        st.sampled_from(
            [
                [Box((0, 0), (1, cols)), Box((1, 0), (rows, cols))],
                [Box((0, col), (rows, cols)), Box((0, 0), (1, col))],
                [Box((0, 0), (rows, col))],
            ]
        )
    )
    spec = ShardSpec.of_boxes("whole", (rows, cols), boxes)
    first = data.draw(st.integers(0, spec.numel))
    spec = spec.narrow(first, data.draw(st.integers(first, spec.numel)))
    whole = rounded_once(values, StochasticRounding(4), "whole")

    part = rounded_once(spec.extract(values), StochasticRounding(4, {"mine": spec}), "mine")

    assert torch.equal(part, spec.extract(whole))


def small_model(rounding, factory, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))
    model[0].to(BF16)
    model[3].to(FP16)
    optimizer = RoundedWeights(model.named_parameters(), factory, rounding=rounding, **options)
    return model, optimizer


def train(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@every_way
@pytest.mark.parametrize("moments", [None, BlockMoments(16, 1)], ids=["float32", "blocks"])
def test_a_resumed_run_is_equal_bit_for_bit(rounding, moments, monkeypatch):
    monkeypatch.setattr(bundles, "BUNDLE_NUMEL", 16)
    factory = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)
    model, optimizer = small_model(rounding, factory, moments=moments)
    train(model, optimizer, 2, 0)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed, other = small_model(rounding, factory, moments=moments)
    train(resumed, other, 1, 9)
    resumed.load_state_dict(weights)
    other.load_state_dict(state)

    train(model, optimizer, 2, 1)
    train(resumed, other, 2, 1)

    assert same(model.state_dict(), resumed.state_dict())
    assert same(
        {k: v for k, v in optimizer.state_dict().items() if k != "param_groups"},
        {k: v for k, v in other.state_dict().items() if k != "param_groups"},
    )


@every_way
@pytest.mark.parametrize(
    "factory",
    [
        functools.partial(torch.optim.AdamW, lr=0.01),
        functools.partial(torch.optim.Adagrad, lr=0.1),
        functools.partial(torch.optim.Adafactor, lr=0.01),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    ],
    ids=["adamw", "adagrad", "adafactor", "sgd"],
)
def test_any_optimizer_computes_its_float32_update_from_the_weights(factory, rounding):
    model, optimizer = small_model(rounding, factory)
    weight = model[0].weight
    wide = nn.Parameter(weight.detach().float())
    oracle = factory([wide])
    train(model, optimizer, 1, 3)
    wide.grad = weight.grad.clone()
    oracle.step()

    spacing = 2.0**-7 * wide.abs()
    assert ((weight.float() - wide).abs() <= spacing).all()
    for key, value in oracle.state[wide].items():
        assert torch.equal(optimizer.state[weight][key], value)


def test_micro_batches_are_summed_in_float32_unless_half_the_memory_is_asked_for():
    wide = weight_of([1.0])
    narrow = weight_of([1.0])
    optimizer_of(wide, StochasticRounding())
    optimizer = optimizer_of(narrow, StochasticRounding(), grad_dtype=None)
    for weight in (wide, narrow):
        for value in [1.0] + [2.0**-9] * 256:
            (weight * torch.tensor(value, dtype=BF16)).sum().backward()

    assert wide.grad.item() == 1.5
    assert narrow.grad.item() == 1.0
    optimizer.step()
    assert narrow.item() == 0.0


def test_only_a_bundle_of_weights_is_in_float32_at_a_time(monkeypatch):
    monkeypatch.setattr(bundles, "BUNDLE_NUMEL", 100)
    held = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            held.append(
                sum(p.untyped_storage().nbytes() for p in weights_of(self) if p.stride() != (0,))
            )
            return super().step(closure)

    def weights_of(optimizer):
        unique = {p.untyped_storage().data_ptr(): p for p in all_own}
        return unique.values()

    weights = [weight_of(torch.ones(60)) for _ in range(5)]
    optimizer = RoundedWeights(
        [(f"w{n}", w) for n, w in enumerate(weights)],
        functools.partial(Watched, lr=0.1),
        rounding=StochasticRounding(),
    )
    all_own = [p for group in optimizer._inner.param_groups for p in group["params"]]
    for weight in weights:
        weight.grad = torch.ones(60)
    optimizer.step()

    assert held == [240] * 5
    assert sum(p.untyped_storage().nbytes() for p in all_own) == 5 * 4


def test_a_compensation_does_not_outlive_the_weight_that_it_was_for():
    weight = weight_of([1000.0])
    optimizer = optimizer_of(weight, KahanCompensation())
    weight.grad = torch.tensor([1.0])
    optimizer.step()
    assert optimizer.state_dict()["compensations"]["w"].item() == -1.0

    weight.data.fill_(0.25)
    weight.grad = torch.tensor([0.0])
    optimizer.step()

    assert weight.item() == 0.25


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda w: optimizer_of(w, WAYS["kahan"], torch.optim.LBFGS), NotAvailableError, "LBFGS"),
        (lambda w: optimizer_of(w, WAYS["kahan"]).step(int), NotAvailableError, "closure"),
        (lambda w: copy.deepcopy(optimizer_of(w, WAYS["kahan"])), PrecisionError, "state_dict"),
        (lambda w: optimizer_of(w, WAYS["kahan"], grad_dtype=FP16), PrecisionError, "grad_dtype"),
        (
            lambda w: optimizer_of(w, StochasticRounding(0, {"w": ShardSpec.full("w", (9,))})),
            PrecisionError,
            "has 9 elements, the weight 2",
        ),
        (
            lambda w: optimizer_of(w, WAYS["kahan"]).load_state_dict(
                optimizer_of(weight_of([1.0, 2.0]), WAYS["stochastic"]).state_dict()
            ),
            PrecisionError,
            "compensations",
        ),
        (
            lambda w: optimizer_of(w, WAYS["kahan"]).add_param_group({"params": []}),
            NotAvailableError,
            "parameter group",
        ),
    ],
    ids=["coupled", "closure", "copy", "grad dtype", "shard", "state", "group"],
)
def test_what_cannot_be_done_says_the_way_out(make, error, says):
    with pytest.raises(error, match=says):
        make(weight_of([1.0, 2.0]))
