"""Moments in fewer bits: they move as they should, never vanish, and resume bit for bit."""

import copy
import functools
import io

import pytest
import torch
from torch import nn

from trainwright.precision import (
    BFloat16Moments,
    BlockMoments,
    MasterWeights,
    NotAvailableError,
    PrecisionError,
    bundles,
)
from trainwright.precision.moments import Dither, Place, decode_moment

BF16 = torch.bfloat16
DITHER = Dither(torch.device("cpu"))
BLOCKS = BlockMoments(block=16, min_numel=1)
FORMS = {"bfloat16": BFloat16Moments(), "blocks": BLOCKS}
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adamw_fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True, foreach=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "adadelta": torch.optim.Adadelta,
    "adamax": functools.partial(torch.optim.Adamax, lr=0.01),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.01),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "rprop": functools.partial(torch.optim.Rprop, lr=0.01),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.01),
    "radam": functools.partial(torch.optim.RAdam, lr=0.01),
    "muon": functools.partial(torch.optim.Muon, lr=0.01),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def encode(form, values, update=0):
    return form.encode(values, DITHER, Place("w", "exp_avg", update))


def decode(kept):
    out = torch.empty(kept["codes"].shape)
    decode_moment(kept, out)
    return out


def run(factory, form, steps=3, seed=0, optimizer=None, weights=None):
    generator = torch.Generator().manual_seed(seed)
    if weights is None:
        start = torch.Generator().manual_seed(7)
        shapes = [(6, 8), (8, 8), (5, 3)]
        weights = [nn.Parameter(torch.randn(s, generator=start).to(BF16)) for s in shapes]
        named = [(f"w{n}", weight) for n, weight in enumerate(weights)]
        groups = [{"params": named[:1]}, {"params": named[1:], "lr": 0.02}]
        optimizer = MasterWeights(groups, factory, moments=form)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weights, optimizer


def assert_same(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


def reload(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_form
def test_the_mean_over_updates_is_the_moment_itself(form):
    values = torch.tensor([1.0, -0.31, 0.0777, 3e-4, 2e-5, 0.0, 1 + 2.0**-9, -1e-6])
    decoded = torch.stack([decode(encode(form, values, update)) for update in range(400)])

    assert all(len(column.unique()) <= 2 for column in decoded.T)
    # Draws are uniform within a spacing: at most half of it is the standard deviation.
    spacing = (decoded.amax(0) - decoded.amin(0)).double()
    off = (decoded.double().mean(0) - values).abs()
    assert (off <= 4 * 0.5 * spacing / 400**0.5 + 1e-12).all()
    assert torch.equal(decode(encode(form, decoded[0])), decoded[0])


@every_form
def test_a_positive_moment_among_positive_ones_never_becomes_zero(form):
    values = torch.tensor([1.0, 1e-9, 1e-20, 1e-38, 1e-45, 0.0])
    for update in range(20):
        decoded = decode(encode(form, values, update))
        assert (decoded[:-1] > 0).all()
        assert decoded[-1] == 0
        assert decoded[1].item() == pytest.approx(1e-9, rel=0.13)


@every_form
@pytest.mark.parametrize("lost", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(form, lost):
    values = torch.ones(40)
    values[3] = lost
    decoded = decode(encode(form, values))

    assert not decoded[3].isfinite()
    assert torch.equal(decoded[16:], values[16:])


def same(one, other):
    return torch.equal(one.nan_to_num(-7.0), other.nan_to_num(-7.0))


@pytest.mark.parametrize("numel", [0, 1, 16, 255, 65536 + 300])
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("size", [2.0**-60, 1.0, 2.0**60])
def test_blocks_are_the_same_where_there_are_no_subnormal_numbers(numel, power, size):
    generator = torch.Generator().manual_seed(numel)
    spread = torch.exp2(8 * torch.randn(numel, generator=generator))
    values = (torch.randn(numel, generator=generator) * spread).pow(power) * size
    values[20:21] = torch.nan
    kept, numbers = encode(BLOCKS, values), decode(encode(BLOCKS, values))

    try:
        assert torch.set_flush_denormal(True)
        without, its_numbers = encode(BLOCKS, values), decode(encode(BLOCKS, values))
    finally:
        torch.set_flush_denormal(False)

    lost = kept["scales"].isnan().repeat_interleave(16)[:numel]
    assert kept["format"] == without["format"]
    assert torch.equal(kept["codes"][~lost], without["codes"][~lost])
    assert same(kept["scales"], without["scales"])
    assert same(numbers, its_numbers)
    assert numbers[lost].isnan().all()
    assert numbers[~lost].isfinite().all()


def test_a_nan_of_all_ones_stays_one_in_bfloat16():
    for bits in (0x7FFFFFFF, -1):
        values = torch.full((64,), bits, dtype=torch.int32).view(torch.float32)
        assert decode(encode(BFloat16Moments(), values)).isnan().all()


@every_form
@pytest.mark.parametrize("numel", [0, 1, 15, 33, 65536 + 17])
def test_any_size_comes_back_within_a_spacing(form, numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    kept = encode(form, values)

    rows = torch.nn.functional.pad(values.abs(), (0, -numel % 16)).view(-1, 16)
    largest = rows.amax(1).repeat_interleave(16)[:numel] if numel else values
    bound = values.abs() * (2.0**-7 if form is not BLOCKS else 2.0**-3)
    assert ((decode(kept) - values).abs() <= torch.maximum(bound, largest * 2.0**-15)).all()


@every_form
def test_a_second_moment_falls_as_it_does_in_float32(form):
    # Each step takes a thousandth; to the nearest of few numbers it would stand still.
    second = torch.rand(512, generator=torch.Generator().manual_seed(0)) + 0.5
    exact = second.double()
    for update in range(300):
        second = decode(encode(form, second * 0.999, update))
        exact = exact * 0.999

    ratio = second.double().sum() / exact.sum()
    assert ratio.item() == pytest.approx(1.0, abs=0.06)


@every_form
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_steps_bundle_by_bundle_and_stays_near_float32(name, form, monkeypatch):
    monkeypatch.setattr(bundles, "BUNDLE_NUMEL", 64)
    weights, optimizer = run(OPTIMIZERS[name], form)
    exact, oracle = run(OPTIMIZERS[name], None)

    first = {n: m.clone() for n, m in optimizer.state_dict()["masters"].items()}
    for key, master in oracle.state_dict()["masters"].items():
        assert (first[key] - master).abs().max() < 0.05
    for weight, other in zip(weights, exact, strict=True):
        assert optimizer.state[weight].keys() == oracle.state[other].keys()
        for key, value in oracle.state[other].items():
            if isinstance(value, torch.Tensor) and value.shape == other.shape:
                assert decode(optimizer.state[weight][key]).shape == value.shape
            else:
                assert_same(optimizer.state[weight][key], value)


@every_form
@pytest.mark.parametrize("name", ["sgd", "adamw_fused", "adagrad"])
def test_a_resumed_run_is_equal_bit_for_bit(name, form):
    weights, optimizer = run(OPTIMIZERS[name], form)
    saved = reload(optimizer.state_dict())
    assert_same(saved["state"], optimizer.state_dict()["state"])
    others, resumed = run(OPTIMIZERS[name], form, steps=1, seed=5)
    resumed.load_state_dict(saved)
    assert_same(resumed.state_dict(), saved)

    run(None, form, 3, 9, optimizer, weights)
    run(None, form, 3, 9, resumed, others)

    assert_same(resumed.state_dict(), optimizer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


@pytest.mark.parametrize("source", [None, *FORMS.values()])
@pytest.mark.parametrize("target", [None, *FORMS.values()])
def test_a_state_loads_into_one_that_is_kept_otherwise(source, target):
    _, optimizer = run(OPTIMIZERS["adamw"], source)
    saved = reload(optimizer.state_dict())
    weights, loaded = run(OPTIMIZERS["adamw"], target, steps=1, seed=3)

    loaded.load_state_dict(saved)

    def as_float(value):
        return decode(value) if isinstance(value, dict) else value

    for entries, own in zip(saved["state"].values(), map(loaded.state.get, weights), strict=True):
        assert own["step"] == entries["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            was, found = as_float(entries[key]), as_float(own[key])
            assert (found - was).abs().max() <= was.abs().max() / 8
            assert isinstance(own[key], dict) == (target is not None)
    run(None, target, 2, 9, loaded, weights)


@pytest.mark.parametrize(
    "damage",
    [
        {"format": "e9m9"},
        {"format": []},
        {"format": "bfloat16"},
        {"codes": None},
        {"codes": torch.zeros(3, dtype=torch.uint8)},
        {"block": 0},
        {"block": 96},
        {"block": None},
        {"scales": None},
        {"scales": torch.ones(1)},
        {"scales": torch.ones(3, dtype=torch.int64)},
    ],
)
def test_a_kept_moment_whose_parts_do_not_fit_is_refused(damage):
    _, optimizer = run(OPTIMIZERS["adamw"], BlockMoments(16, 1))
    saved = reload(optimizer.state_dict())
    first = next(iter(saved["state"].values()))
    kept = next(key for key, value in first.items() if isinstance(value, dict))
    first[kept] = {**first[kept], **damage}

    with pytest.raises(PrecisionError, match=kept):
        optimizer.load_state_dict(saved)


def test_only_a_bundle_of_moments_is_in_float32_at_a_time(monkeypatch):
    monkeypatch.setattr(bundles, "BUNDLE_NUMEL", 1000)
    seen, places = [], set()

    class Watched(torch.optim.AdamW):
        def step(self, closure=None):
            moments = [v for s in self.state.values() for v in s.values() if v.ndim]
            places.update(v.untyped_storage().data_ptr() for v in moments)
            result = super().step(closure)
            seen.append(sum(v.numel() for s in self.state.values() for v in s.values() if v.ndim))
            return result

    weights = [nn.Parameter(torch.ones(400, dtype=BF16)) for _ in range(9)]
    weights.append(nn.Parameter(torch.ones(1500, dtype=BF16)))
    named = [(f"w{n}", weight) for n, weight in enumerate(weights)]
    optimizer = MasterWeights(
        named, functools.partial(Watched, lr=0.1), moments=BlockMoments(256, 1)
    )
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones(weight.shape)
        optimizer.step()

    assert seen == 2 * [1600, 1600, 1600, 1600, 800, 3000]
    # Where moments are before a step: in the memory for a bundle, which grew once, maybe in place.
    assert 1 <= len(places) <= 2
    for weight in weights:
        kept = optimizer.state[weight]["exp_avg_sq"]
        size = kept["codes"].nbytes + kept["scales"].nbytes
        assert size == weight.numel() + 4 * -(-weight.numel() // 256)


def test_small_tensors_stay_in_float32_unless_asked():
    weight = nn.Parameter(torch.ones(100, dtype=BF16))
    optimizer = MasterWeights([("w", weight)], OPTIMIZERS["adamw"], moments=BlockMoments())
    weight.grad = torch.ones(100)
    optimizer.step()

    assert optimizer.state[weight]["exp_avg"].dtype is torch.float32


class Failing(torch.optim.AdamW):
    fails = False

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise RuntimeError("no")


def test_a_failing_step_leaves_the_moments_as_they_were():
    weights, optimizer = run(functools.partial(Failing, lr=0.1), BLOCKS)
    before = copy.deepcopy(optimizer.state_dict()["state"][0]["exp_avg"])
    optimizer._inner.fails = True

    with pytest.raises(RuntimeError, match="no"):
        optimizer.step()

    assert_same(optimizer.state_dict()["state"][0]["exp_avg"], before)
    optimizer._inner.fails = False
    run(None, BLOCKS, 1, 2, optimizer, weights)


class Coupled(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
        return super().step(closure)


def test_optimizers_that_couple_parameters_are_refused(monkeypatch):
    monkeypatch.setattr(bundles, "BUNDLE_NUMEL", 64)
    with pytest.raises(NotAvailableError, match="LBFGS"):
        MasterWeights(
            [("w", nn.Parameter(torch.ones(2)))], torch.optim.LBFGS, moments=BFloat16Moments()
        )
    with pytest.raises(NotAvailableError, match="Coupled changes its options"):
        run(functools.partial(Coupled, lr=0.1), BLOCKS)


def test_what_cannot_be_kept_or_loaded_is_refused_and_changes_nothing():
    with pytest.raises(PrecisionError, match="power of two"):
        BlockMoments(block=100)
    _, optimizer = run(OPTIMIZERS["adamw"], BLOCKS)
    before = copy.deepcopy(optimizer.state_dict())
    for spoil in ({"codes": torch.ones(3)}, {"format": "e9m9"}):
        state = copy.deepcopy(before)
        state["state"][1]["exp_avg"].update(spoil)
        with pytest.raises(PrecisionError, match="exp_avg of w1"):
            optimizer.load_state_dict(state)
    assert_same(optimizer.state_dict(), before)
