"""FP32 master weights: nothing is lost, nothing goes stale, everything resumes."""

import copy
import functools
import io
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import LocalWorld
from trainwright.precision import (
    BFloat16Moments,
    DynamicLossScaler,
    MasterWeights,
    NotAvailableError,
    PrecisionError,
    passing,
    policy,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SGD = functools.partial(torch.optim.SGD, lr=0.1)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "adamw_fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adamw_foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "adadelta": torch.optim.Adadelta,
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.01),
    "muon": functools.partial(torch.optim.Muon, lr=0.01),
}


def scalar(value, dtype=BF16, factory=SGD):
    weight = nn.Parameter(torch.tensor([value], dtype=dtype))
    return weight, MasterWeights([("w", weight)], factory)


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))


def narrow_model(factory=ADAMW, seed=0):
    model = small_model(seed)
    applied = policy("bfloat16", keep_fp32=["2.*"]).apply(model)
    return model, MasterWeights(model.named_parameters(), factory, originals=applied.originals)


def train(model, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()


def equal_states(a, b):
    assert a.keys() == b.keys()
    assert a["param_groups"] == b["param_groups"]
    assert a["masters"].keys() == b["masters"].keys()
    pairs = [(a["masters"][name], b["masters"][name]) for name in a["masters"]]
    for index, state in a["state"].items():
        pairs += [(value, b["state"][index][key]) for key, value in state.items()]
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs)


def test_small_updates_add_up_in_the_master_and_show_in_the_narrow_copy():
    weight, optimizer = scalar(1.0, factory=functools.partial(torch.optim.SGD, lr=6e-4))
    bare = nn.Parameter(torch.ones(1, dtype=BF16))
    bare_optimizer = torch.optim.SGD([bare], lr=6e-4)

    for _ in range(100):
        weight.grad, bare.grad = torch.ones(1), torch.ones(1, dtype=BF16)
        optimizer.step()
        bare_optimizer.step()

    assert bare.item() == 1.0
    assert optimizer.state_dict()["masters"]["w"].item() == pytest.approx(0.94, abs=1e-5)
    assert weight.item() == 0.94140625


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(seed=st.integers(0, 1000))
def test_any_optimizer_updates_the_masters_as_float32_weights(name, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 3), (3, 3)] if name == "muon" else [(2, 3), (4,)]
    wide = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    narrow = [nn.Parameter(weight.detach().to(BF16)) for weight in wide]
    names = [f"w{i}" for i in range(len(wide))]
    originals = {n: weight.detach().clone() for n, weight in zip(names, wide, strict=True)}
    oracle = OPTIMIZERS[name](wide)
    optimizer = MasterWeights(
        zip(names, narrow, strict=True), OPTIMIZERS[name], originals=originals
    )

    for _ in range(3):
        for a, b in zip(wide, narrow, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        oracle.step()
        optimizer.step()

    for n, a, b in zip(names, wide, narrow, strict=True):
        assert torch.equal(optimizer.state_dict()["masters"][n], a)
        assert torch.equal(b, a.to(BF16))
        for key, value in oracle.state[a].items():
            if isinstance(value, torch.Tensor):
                assert optimizer.state[b][key].dtype == value.dtype == FP32
                assert torch.equal(optimizer.state[b][key], value)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradients_of_micro_batches_are_summed_in_float32(dtype):
    weight, optimizer = scalar(1.0, dtype)

    for value in [1.0] + [2.0**-9] * 256:
        (weight * torch.tensor(value, dtype=dtype)).sum().backward()

    assert weight.grad.dtype == FP32
    assert weight.grad.item() == 1.5
    optimizer.zero_grad()
    assert weight.grad is None


def test_micro_batches_are_accumulated_before_the_ranks_reduce():
    def step(communicator):
        weight, _ = scalar(0.0)
        for _ in range(2):
            (weight * (1.0 if communicator.rank == 0 else 3.0)).sum().backward()
        communicator.all_reduce(weight.grad).wait()
        return weight.grad.item() / (2 * communicator.size)

    assert LocalWorld(2).run(step) == [2.0, 2.0]


@pytest.mark.parametrize(
    "swap",
    [
        lambda weight, new: weight.copy_(new),
        lambda weight, new: weight.data.copy_(new),
        lambda weight, new: setattr(weight, "data", new.to(weight.dtype)),
        lambda weight, new: weight.set_(new.to(weight.dtype)),
    ],
    ids=["copy", "data copy", "data set", "set"],
)
def test_a_weight_swapped_in_the_model_is_taken_over_by_the_master(swap):
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=BF16))
    optimizer = MasterWeights([("w", weight)], SGD)
    weight.grad = torch.tensor([1e-3, 1e-3])
    optimizer.step()
    kept = optimizer.state_dict()["masters"]["w"][0].item()

    with torch.no_grad():
        swap(weight, torch.tensor([1.0, -5.0]))
    master = optimizer.state_dict()["masters"]["w"].clone()

    assert kept == pytest.approx(0.9999)
    assert master.tolist() == [kept, -5.0]
    assert torch.equal(master.to(BF16), weight)
    optimizer.step()
    after = optimizer.state_dict()["masters"]["w"]
    assert torch.allclose(after, master - 1e-4, rtol=0, atol=1e-6)
    assert torch.equal(after.to(BF16), weight)


def test_a_step_starts_from_the_weight_that_was_put_into_the_model():
    weight, optimizer = scalar(1.0)

    with torch.no_grad():
        weight.fill_(-5.0)
    weight.grad = torch.ones(1)
    optimizer.step()

    assert optimizer.state_dict()["masters"]["w"].item() == pytest.approx(-5.1)


def test_loading_the_optimizer_alone_brings_the_models_weights_along():
    model, optimizer = narrow_model()
    train(model, optimizer, 2)
    other, other_optimizer = narrow_model(seed=9)

    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    for name in ("0.weight", "3.bias"):
        assert torch.equal(other.get_parameter(name), model.get_parameter(name))


def test_loading_a_fresh_state_leaves_no_moments_behind():
    model, optimizer = narrow_model()
    fresh = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 1)

    optimizer.load_state_dict(fresh)

    assert len(optimizer.state) == 0


def test_gradients_are_freed_with_the_models():
    weight, optimizer = scalar(1.0)
    weight.grad = torch.ones(1)
    alive = weakref.ref(weight.grad)
    optimizer.step()

    optimizer.zero_grad()

    assert alive() is None


def test_weights_swapped_out_and_back_lose_no_digit():
    model, optimizer = narrow_model()
    other, other_optimizer = narrow_model()
    train(model, optimizer, 3)
    train(other, other_optimizer, 3)

    own = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: torch.zeros_like(value) for name, value in own.items()})
    model.load_state_dict(own)
    train(model, optimizer, 3)
    train(other, other_optimizer, 3)

    assert equal_states(optimizer.state_dict(), other_optimizer.state_dict())


def test_a_nan_written_into_the_model_reaches_the_master():
    weight, optimizer = scalar(1.0)

    with torch.no_grad():
        weight.fill_(torch.nan)

    assert optimizer.state_dict()["masters"]["w"].isnan().all()


@given(
    steps=st.integers(0, 3),
    name=st.sampled_from(["adamw", "sgd", "amsgrad", "adafactor"]),
    model_first=st.booleans(),
)
def test_a_resumed_run_is_equal_bit_for_bit(steps, name, model_first):
    model, optimizer = narrow_model(OPTIMIZERS[name])
    train(model, optimizer, steps)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    resumed, resumed_optimizer = narrow_model(OPTIMIZERS[name], seed=9)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    loads = [
        lambda: resumed.load_state_dict(saved["model"]),
        lambda: resumed_optimizer.load_state_dict(saved["optimizer"]),
    ]
    for load in loads if model_first else reversed(loads):
        load()
    train(model, optimizer, 2)
    train(resumed, resumed_optimizer, 2)

    assert equal_states(optimizer.state_dict(), resumed_optimizer.state_dict())
    for mine, theirs in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_masters_start_from_the_weights_before_rounding():
    model = small_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    applied = policy("bfloat16", keep_fp32=["2.*"]).apply(model)

    optimizer = MasterWeights(model.named_parameters(), ADAMW, originals=applied.originals)

    masters = optimizer.state_dict()["masters"]
    assert set(masters) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert all(torch.equal(masters[name], before[name]) for name in masters)


def test_originals_that_are_not_those_of_the_model_are_refused():
    model = small_model()
    applied = policy("bfloat16").apply(model)
    with torch.no_grad():
        model[0].weight.zero_()

    with pytest.raises(PrecisionError, match=r"originals\['0\.weight'\]"):
        MasterWeights(model.named_parameters(), ADAMW, originals=applied.originals)


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_a_wide_parameter_is_its_own_master(dtype):
    weight, optimizer = scalar(1.0, dtype)
    weight.grad = torch.ones(1, dtype=dtype)

    optimizer.step()

    assert optimizer.state_dict()["masters"] == {}
    assert weight.dtype == dtype
    assert torch.equal(weight, torch.tensor([1.0], dtype=dtype) - 0.1)


def test_torch_schedulers_drive_the_masters():
    weight, optimizer = scalar(0.0, FP16)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 2.0**-k)

    for _ in range(3):
        weight.grad = torch.ones(1)
        optimizer.step()
        schedule.step()

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    assert weight.item() == pytest.approx(-0.175, abs=1e-4)


def test_groups_keep_their_options_and_may_be_empty():
    model = small_model()
    policy("bfloat16").apply(model)
    named = dict(model.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named.items() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named.items() if p.ndim < 2], "weight_decay": 0.0},
        {"params": [], "weight_decay": 0.5},
    ]

    optimizer = MasterWeights(groups, ADAMW)
    train(model, optimizer, 1)

    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.5]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01] * 3
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "3.weight"]
    assert optimizer.param_groups[0]["params"] == [named["0.weight"], named["3.weight"]]


def test_what_an_optimizer_writes_into_its_groups_is_kept():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
            return super().step(closure)

    weight, optimizer = scalar(1.0, factory=functools.partial(Counting, lr=0.1))
    weight.grad = torch.ones(1)
    optimizer.step()
    optimizer.step()

    assert optimizer.param_groups[0]["calls"] == 2


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw_fused"])
@pytest.mark.parametrize("moments", [None, BFloat16Moments()], ids=["float32", "bfloat16"])
def test_a_group_added_later_trains_as_one_given_at_the_start(name, moments):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in [(3, 4), (5,), (2, 2)]]
    dtypes = [BF16, BF16, FP32]
    weights, others = (
        [nn.Parameter(v.to(dtype)) for v, dtype in zip(values, dtypes, strict=True)]
        for _ in range(2)
    )
    late = {"params": [("b", others[1]), ("c", others[2])], "lr": 0.5}
    whole = MasterWeights(
        [
            {"params": [("a", weights[0])]},
            {**late, "params": [("b", weights[1]), ("c", weights[2])]},
        ],
        OPTIMIZERS[name],
        moments=moments,
    )
    grown = MasterWeights([("a", others[0])], OPTIMIZERS[name], moments=moments)

    for step in range(4):
        if step == 1:
            grown.add_param_group(late)
        for weight, other in zip(weights, others, strict=True):
            present = step > 0 or weight is weights[0]
            weight.grad = torch.randn(weight.shape, generator=generator) if present else None
            other.grad = None if weight.grad is None else weight.grad.clone()
        whole.step()
        grown.step()
    saved = copy.deepcopy(grown.state_dict())
    grown.load_state_dict(saved)

    assert grown.param_groups[1]["lr"] == 0.5
    assert grown.param_groups[1]["param_names"] == ["b", "c"]
    assert all(torch.equal(one, two) for one, two in zip(weights, others, strict=True))
    masters, expected = saved["masters"], whole.state_dict()["masters"]
    assert set(masters) == set(expected) == {"a", "b"}
    assert all(torch.equal(masters[key], expected[key]) for key in masters)


def test_a_group_that_is_refused_changes_nothing():
    _, optimizer = scalar(1.0)
    late = nn.Parameter(torch.ones(1, dtype=BF16))
    late.sum().backward()

    with pytest.raises(PrecisionError, match="v already has a gradient"):
        optimizer.add_param_group({"params": [("v", late)]})

    assert len(optimizer.param_groups) == 1
    assert set(optimizer.state_dict()["masters"]) == {"w"}


def test_a_parameter_without_gradient_is_left_alone():
    model, optimizer = narrow_model(functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5))
    before = model[3].weight.detach().clone()

    model[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()

    assert torch.equal(model[3].weight, before)
    assert model[3].weight not in optimizer.state
    assert model[0].weight in optimizer.state


def test_a_stale_gradient_is_never_used():
    model, optimizer = narrow_model(SGD)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())

    model.zero_grad()
    optimizer.step()

    assert all(torch.equal(before[n], value) for n, value in model.state_dict().items())


def test_clipping_the_models_parameters_clips_what_the_masters_see():
    weight, optimizer = scalar(0.0, FP16, functools.partial(torch.optim.SGD, lr=1.0))
    scaler = DynamicLossScaler(1024.0)

    scaler.scale((weight * 3.0).sum()).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_([weight], 0.5)
    applied = scaler.step(optimizer)

    assert applied
    assert norm.item() == 3.0
    assert weight.item() == pytest.approx(-0.5, abs=1e-3)


def test_a_gradient_too_small_for_float16_survives_unscaling():
    weight, optimizer = scalar(1.0, FP16)
    scaler = DynamicLossScaler(2.0**16)
    small = 2.0**-26  # below half of float16's smallest subnormal, 2**-24

    scaler.scale((weight.float() * small).sum()).backward()
    scaler.unscale_(optimizer)

    assert weight.grad.item() == small
    assert torch.tensor(small, dtype=FP16).item() == 0.0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MasterWeights([], SGD), PrecisionError, "at least one"),
        (lambda: MasterWeights(nn.Linear(1, 1).parameters(), SGD), PrecisionError, "named_param"),
        (
            lambda: MasterWeights(
                [("w", nn.Parameter(torch.ones(1))), ("w", nn.Parameter(torch.ones(1)))], SGD
            ),
            PrecisionError,
            r"\['w'\] appear twice",
        ),
        (lambda: scalar(1.0)[1].step(lambda: None), NotAvailableError, "closure"),
        (
            lambda: scalar(1.0)[1].add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
            PrecisionError,
            "pairs",
        ),
        (
            lambda: scalar(1.0)[1].add_param_group(
                {"params": [("w", nn.Parameter(torch.ones(1)))]}
            ),
            PrecisionError,
            "w is a parameter of this optimizer already",
        ),
        (lambda: copy.deepcopy(scalar(1.0)[1]), PrecisionError, "state_dict"),
    ],
    ids=["empty", "no names", "same name", "closure", "group", "taken", "copy"],
)
def test_what_cannot_be_done_says_the_way_out(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_gradient_from_before_is_refused():
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    weight.sum().backward()

    with pytest.raises(PrecisionError, match="before the first backward"):
        MasterWeights([("w", weight)], SGD)


def test_a_gradient_made_narrow_by_hand_is_refused():
    weight, optimizer = scalar(1.0)
    weight.grad_dtype = BF16
    weight.grad = torch.ones(1, dtype=BF16)

    with pytest.raises(PrecisionError, match=r"gradient of w must be torch\.float32"):
        optimizer.step()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop("masters"), "must hold 'masters'"),
        (lambda state: state["masters"].pop("0.weight"), r"master of 0\.weight.*none"),
        (
            lambda state: state["masters"].update({"0.bias": torch.ones(9)}),
            r"master of 0\.bias.*\(5,\).*\(9,\)",
        ),
        (
            lambda state: state["param_groups"][0]["param_names"].reverse(),
            "the state is that of parameters",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(spoil, message):
    model, optimizer = narrow_model()
    train(model, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state)
    spoil(state)
    for value in state.get("masters", {}).values():
        value.add_(1.0)

    with pytest.raises(PrecisionError, match=message):
        optimizer.load_state_dict(state)

    assert equal_states(optimizer.state_dict(), before)


def test_a_step_of_the_masters_never_makes_the_host_wait():
    # Meta tensors have no values: reading one back raises.
    weight = nn.Parameter(torch.ones(3, dtype=BF16, device="meta"))
    optimizer = MasterWeights([("w", weight)], OPTIMIZERS["sgd"])

    (weight * 2).sum().backward()
    optimizer.step()

    assert weight.grad.dtype == FP32
    assert optimizer.state[weight]["momentum_buffer"].device.type == "meta"


def master_step(pieces: bool, seed: int, monkeypatch, **options):
    """Weights and states after steps, in one pass over pieces or in three passes."""
    monkeypatch.setattr(passing, "_PIECE", 8)
    if not pieces:
        monkeypatch.setattr(passing.OnePass, "fits", staticmethod(lambda *_: False))
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 7), (1,), (4, 4), (), (5,), (2, 9), (0,)]
    dtypes = [BF16, FP16, BF16, FP32, BF16, BF16, BF16]
    weights = [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    weights[5].data = weights[5].data.t().contiguous().t()  # with gaps along its rows
    named = [(f"w{number}", weight) for number, weight in enumerate(weights)]
    groups = [{"params": named[:3]}, {"params": named[3:], "lr": 0.1}]
    make = options.pop("make", torch.optim.AdamW)
    optimizer = MasterWeights(groups, functools.partial(make, lr=0.01, fused=True, **options))
    for step in range(5):
        for number, weight in enumerate(weights):
            weight.grad = None
            if (number + step) % 4:
                weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        if step == 2:
            weights[0].data = weights[0].data.clone().fill_(0.5)
            weights[2].data[1, 1] = -3.0
            weights[5].data = weights[5].data.contiguous()
        if step == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = optimizer.state_dict()
    monkeypatch.undo()
    return weights, state


@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True, "maximize": True}, {"make": torch.optim.Adam, "weight_decay": 0.1}],
    ids=["adamw", "amsgrad", "adam"],
)
def test_one_pass_over_memory_gives_the_bits_of_three(options, monkeypatch):
    whole_weights, whole = master_step(False, 3, monkeypatch, **options)
    weights, state = master_step(True, 3, monkeypatch, **options)

    assert equal_states(state, whole)
    assert all(torch.equal(a, b) for a, b in zip(weights, whole_weights, strict=True))


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40, unique=True),
    dtypes=st.lists(st.sampled_from([BF16, FP16]), min_size=40, max_size=40),
)
def test_one_element_swapped_is_found_among_any_number_of_lengths(lengths, dtypes):
    comparison = passing.Comparison()
    masters = [torch.linspace(0.1, 1.0, length) for length in lengths]
    weights = [m.to(dtype) for m, dtype in zip(masters, dtypes, strict=False)]
    for _ in range(2):
        for weight, master in zip(weights, masters, strict=True):
            kept = master.clone()
            comparison.take_over(weight, master)
            assert torch.equal(master, kept)
            weight[-1:] += 1
            comparison.take_over(weight, master)
            assert torch.equal(master[:-1], kept[:-1])
            assert torch.equal(master[-1:], weight[-1:].float())
            master[-1:] += 1e-4
            weight.copy_(master)


def test_a_fused_optimizer_goes_over_its_weights_in_one_pass(monkeypatch):
    passed = []
    step = passing.OnePass.step
    monkeypatch.setattr(
        passing.OnePass, "step", lambda self: passed.append(step(self)) or passed[-1]
    )

    master_step(True, 0, monkeypatch)

    # The first makes the states; where a weight or its master has gaps, all go the long way.
    assert passed == [False, False, False, True, False]
