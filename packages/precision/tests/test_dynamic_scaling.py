"""The dynamic scale: equal to torch's, resumable, agreed, bounded."""

import json
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn

from trainwright.collectives import LocalWorld
from trainwright.precision import (
    DynamicLossScaler,
    LossScaleError,
    MasterWeights,
    PrecisionError,
    ScalerOrderError,
    StaticLossScaler,
    UnitLossScaler,
)
from trainwright.precision.testing import CountingCommunicator, gradients, train_step

INF = math.inf


class Loop:
    """One weight under AdamW and a scaler, stepped by given gradients."""

    def __init__(self, scaler, num_optimizers=1):
        self.scaler = scaler
        self.weights = [nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(num_optimizers)]
        self.optimizers = [torch.optim.AdamW([weight], lr=0.1) for weight in self.weights]

    def iterate(self, microbatches, explicit=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for gradient in microbatches:
            loss = sum((weight * gradient).sum() for weight in self.weights)
            self.scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            if explicit:
                self.scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        verdicts = [self.scaler.step(optimizer) for optimizer in self.optimizers]
        self.scaler.update()
        return verdicts


def numbers(scaler):
    state = scaler.state_dict()
    return {key: state[key] for key in ("scale", "_growth_tracker", "growth_interval")}


def overflow(scaler, times=1):
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(times):
        assert not train_step(scaler, weight, optimizer, INF)


def clean(scaler, times=1):
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(times):
        assert train_step(scaler, weight, optimizer, 0.5)


@given(
    steps=st.lists(
        st.tuples(st.lists(gradients(), min_size=1, max_size=3), st.booleans()), max_size=12
    ),
    init=st.sampled_from([2.0**16, 1000.0, 3.3, 2.0**126]),
    growth=st.sampled_from([2.0, 1.7, 1e3]),
    backoff=st.sampled_from([0.5, 0.3]),
    interval=st.integers(1, 4),
    num_optimizers=st.integers(1, 2),
)
def test_scales_and_weights_are_those_of_torch_grad_scaler(
    steps, init, growth, backoff, interval, num_optimizers
):
    settings = (init, growth, backoff, interval)
    ours = Loop(DynamicLossScaler(*settings, min_scale=0.0), num_optimizers)
    theirs = Loop(torch.amp.GradScaler("cpu", *settings), num_optimizers)
    for microbatches, explicit in steps:
        ours.iterate(microbatches, explicit)
        theirs.iterate(microbatches, explicit)
        assert numbers(ours.scaler) == numbers(theirs.scaler)
        for mine, yours in zip(ours.weights, theirs.weights, strict=True):
            assert torch.equal(mine, yours)


class ScalerBesideTorch(RuleBasedStateMachine):
    """Any order of steps, settings by hand and restarts keeps both scalers together."""

    def __init__(self):
        super().__init__()
        self.ours = Loop(DynamicLossScaler(64.0, growth_interval=3, min_scale=0.0))
        self.theirs = Loop(torch.amp.GradScaler("cpu", 64.0, growth_interval=3))
        self.applied = 0
        self.skipped = 0

    @rule(gradient=st.sampled_from([0.5, 3.0, 0.0]))
    def clean_step(self, gradient):
        assert self.ours.iterate([gradient]) == [True]
        self.theirs.iterate([gradient])
        self.applied += 1

    @rule(gradient=st.sampled_from([INF, math.nan]))
    def overflowing_step(self, gradient):
        assert self.ours.iterate([gradient]) == [False]
        self.theirs.iterate([gradient])
        self.skipped += 1

    @rule(scale=st.sampled_from([8.0, 1000.0]))
    @precondition(lambda self: self.applied + self.skipped > 0)
    def scale_set_by_hand(self, scale):
        self.ours.scaler.update(scale)
        self.theirs.scaler.update(scale)

    @rule()
    def restart(self):
        state = json.loads(json.dumps(self.ours.scaler.state_dict()))
        self.ours.scaler = DynamicLossScaler(2.0**16, min_scale=0.0)
        self.ours.scaler.load_state_dict(state)

    @rule()
    @precondition(lambda self: self.applied + self.skipped > 0)
    def exchange_of_states_with_torch(self):
        ours, theirs = self.ours.scaler.state_dict(), self.theirs.scaler.state_dict()
        self.theirs.scaler.load_state_dict(ours)
        self.ours.scaler.load_state_dict({**ours, **theirs})

    @invariant()
    def the_same_scale_and_weights(self):
        assert numbers(self.ours.scaler) == numbers(self.theirs.scaler)
        assert torch.equal(self.ours.weights[0], self.theirs.weights[0])

    @invariant()
    def every_iteration_is_counted(self):
        state = self.ours.scaler.state_dict()
        assert (state["num_applied"], state["num_skipped"]) == (self.applied, self.skipped)


TestScalerBesideTorch = ScalerBesideTorch.TestCase


def test_a_resumed_scale_goes_on_where_it_was():
    scaler = DynamicLossScaler(65536.0, growth_interval=4)
    overflow(scaler, 8)
    clean(scaler, 3)
    resumed = DynamicLossScaler()

    resumed.load_state_dict(scaler.state_dict())

    assert resumed.get_scale() == 256.0
    assert resumed.state_dict()["_growth_tracker"] == 3
    clean(resumed)
    assert resumed.get_scale() == 512.0


def test_growth_comes_at_the_same_step_however_often_a_run_restarts():
    def grows_at(restarts):
        scaler = DynamicLossScaler(64.0, growth_interval=4)
        for step in range(1, 10):
            overflow(scaler) if step == 2 else clean(scaler)
            if step in restarts:
                state, scaler = scaler.state_dict(), DynamicLossScaler(64.0)
                scaler.load_state_dict(state)
            if scaler.get_scale() == 64.0 and step > 2:
                return step
        return None

    assert grows_at(()) == grows_at((4,)) == grows_at((1, 2, 3, 4, 5)) == 6


@pytest.mark.parametrize("order", [("scaler", "optimizer"), ("optimizer", "scaler")])
def test_loading_never_runs_a_step(order):
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    saved = MasterWeights([("w", weight)], lambda groups: torch.optim.AdamW(groups, lr=0.1))
    scaler = DynamicLossScaler(512.0)
    for _ in range(3):
        train_step(scaler, weight, saved, 0.5)
    new_weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    calls = []

    class CountedAdamW(torch.optim.AdamW):
        def step(self, closure=None):
            calls.append(closure)
            return super().step(closure)

    optimizer = MasterWeights([("w", new_weight)], lambda groups: CountedAdamW(groups, lr=0.1))
    fresh = {"scaler": DynamicLossScaler(), "optimizer": optimizer}
    states = {"scaler": scaler.state_dict(), "optimizer": saved.state_dict()}

    for name in order:
        fresh[name].load_state_dict(states[name])

    assert calls == []
    assert fresh["scaler"].state_dict() == scaler.state_dict()
    assert fresh["scaler"].state_dict()["_growth_tracker"] == 3
    assert float(optimizer.state[new_weight]["step"]) == 3
    assert torch.equal(new_weight, weight)


def test_the_schedule_stays_on_skipped_steps():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: (k + 1) / 10)
    scaler = DynamicLossScaler(65536.0)

    for step in range(10):
        if train_step(scaler, weight, optimizer, INF if step in (3, 7) else 0.5):
            schedule.step()

    assert schedule.last_epoch == 8
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.9)
    state = scaler.state_dict()
    assert (state["num_applied"], state["num_skipped"]) == (8, 2)


def test_what_a_schedule_raises_reaches_the_user_and_moves_no_rate():
    def broken(k):
        raise TypeError("the user's own mistake")

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)

    with pytest.raises(TypeError, match="own mistake"):
        torch.optim.lr_scheduler.LambdaLR(optimizer, broken)

    assert optimizer.param_groups[0]["lr"] == 1.0


def test_clipping_in_an_accumulation_loop_is_refused_and_divides_nothing_twice():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = StaticLossScaler(8.0)

    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerOrderError, match="only once"):
        scaler.scale(weight.sum())
    with pytest.raises(ScalerOrderError, match="divided twice"):
        scaler.unscale_(optimizer)

    assert weight.grad.item() == 1.0


def test_gradients_of_two_micro_batches_are_unscaled_once():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = StaticLossScaler(8.0)
    for _ in range(2):
        scaler.scale(weight.sum()).backward()

    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([weight], 100.0)
    scaler.step(optimizer)

    assert weight.grad.item() == 2.0
    assert weight.item() == -2.0


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("step step", "once at the end"),
        ("step unscale_", "call update"),
        ("update", "without step"),
    ],
)
def test_calls_out_of_order_are_refused(calls, message):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = DynamicLossScaler(8.0)
    scaler.scale(weight.sum()).backward()
    *allowed, refused = calls.split()
    for name in allowed:
        getattr(scaler, name)(optimizer)

    with pytest.raises(ScalerOrderError, match=message):
        getattr(scaler, refused)(*([] if refused == "update" else [optimizer]))


def test_an_overflow_on_one_rank_halves_the_scale_of_every_rank():
    def train(communicator):
        scaler = DynamicLossScaler(8.0, communicator=communicator, growth_interval=2)
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        first = train_step(scaler, weight, optimizer, INF if communicator.rank == 0 else 1.0)
        states = [(first, scaler.get_scale(), scaler.state_dict()["_growth_tracker"])]
        second = train_step(scaler, weight, optimizer, 1.0)
        return [*states, (second, scaler.get_scale(), scaler.state_dict()["_growth_tracker"])]

    assert LocalWorld(2).run(train) == [[(False, 4.0, 0), (True, 4.0, 1)]] * 2


def test_optimizers_unscaled_together_are_stepped_together():
    scaler = DynamicLossScaler(8.0)
    good, bad = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in (good, bad)]
    scaler.scale(good.sum() + (bad * INF).sum()).backward()

    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    verdicts = [scaler.step(optimizer) for optimizer in optimizers]
    scaler.update()

    assert verdicts == [False, False]
    assert good.item() == 1.0
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("num_optimizers", [1, 3])
def test_the_decision_costs_one_all_reduce_of_four_bytes(num_optimizers):
    communicator = CountingCommunicator()
    loop = Loop(DynamicLossScaler(8.0, communicator=communicator), num_optimizers)

    loop.iterate([1.0])

    assert (communicator.num_all_reduces, communicator.num_bytes) == (1, 4)


def test_a_rank_without_gradients_joins_the_decision():
    def train(communicator):
        scaler = DynamicLossScaler(8.0, communicator=communicator)
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        if communicator.rank == 0:
            scaler.scale((weight * INF).sum()).backward()
        return scaler.step(optimizer)

    assert LocalWorld(3).run(train) == [False] * 3


def test_a_scale_below_its_bound_names_the_first_non_finite_parameter():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    scaler = DynamicLossScaler(2.0, named_parameters=model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def iterate():
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        model[1].weight.grad[0, 1] = INF
        model[1].bias.grad[0] = math.nan
        scaler.step(optimizer)
        scaler.update()

    iterate()
    assert scaler.get_scale() == 1.0
    with pytest.raises(LossScaleError, match=r"from 1\.0 to 0\.5.*rank 0 is that of 1\.weight"):
        iterate()


def test_without_names_the_place_of_the_parameter_is_said():
    weight = nn.Parameter(torch.ones(2, 3))
    scaler = DynamicLossScaler(1.0)

    with pytest.raises(LossScaleError, match=r"parameter 0 of group 0, shape \(2, 3\)"):
        train_step(scaler, weight, torch.optim.SGD([weight], lr=1.0), INF)


def test_the_bound_is_an_error_on_every_rank():
    def train(communicator):
        scaler = DynamicLossScaler(1.0, communicator=communicator)
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([("w", weight)], lr=1.0)
        try:
            train_step(scaler, weight, optimizer, INF if communicator.rank == 1 else 1.0)
        except LossScaleError as error:
            return str(error)
        return None

    messages = LocalWorld(2).run(train)

    assert "no gradient on rank 0" in messages[0]
    assert "on rank 1 is that of w;" in messages[1]


def test_a_float16_loss_is_scaled_without_overflow():
    loss = torch.tensor(5.0, dtype=torch.float16)

    assert DynamicLossScaler(65536.0).scale(loss).item() == 5.0 * 65536.0


def test_a_loss_is_multiplied_by_the_scale_of_the_moment():
    scaler = DynamicLossScaler(64.0, growth_interval=2)
    one = torch.tensor(1.0)
    scales = [scaler.scale(one).item()]
    for step in (overflow, clean, clean):
        step(scaler)
        scales.append(scaler.scale(one).item())
    clean(scaler)
    scaler.update(5.0)
    state = {**scaler.state_dict(), "scale": 7.0}
    scales.append(scaler.scale(one).item())
    scaler.load_state_dict(state)
    scales.append(scaler.scale(one).item())

    assert scales == [64.0, 32.0, 32.0, 64.0, 5.0, 7.0]


def test_the_scale_never_grows_to_infinity():
    ours = Loop(DynamicLossScaler(2.0**127, growth_interval=1))
    theirs = Loop(torch.amp.GradScaler("cpu", 2.0**127, growth_interval=1))

    for loop in (ours, theirs):
        loop.iterate([2.0**-120])

    assert ours.scaler.get_scale() == theirs.scaler.get_scale() == 2.0**127
    assert numbers(ours.scaler)["_growth_tracker"] == 0


def test_several_losses_get_one_scale_and_keep_their_container():
    scaler = StaticLossScaler(4.0)
    losses = [torch.tensor(1.0), torch.tensor(2.0)]

    assert [loss.item() for loss in scaler.scale(losses)] == [4.0, 8.0]
    assert isinstance(scaler.scale(tuple(losses)), tuple)


def test_float16_gradients_are_refused_and_the_unit_scaler_lets_them_pass():
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([("layer.weight", weight)], lr=0.5)

    with pytest.raises(PrecisionError, match=r"layer\.weight is float16.*MasterWeights"):
        train_step(StaticLossScaler(2.0), weight, optimizer, 1.0)
    weight.grad = None

    assert train_step(UnitLossScaler(), weight, optimizer, 1.0)
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=16), min_size=1))
@example(values=[-0.0, 5.960464477539063e-08])
def test_the_unit_scaler_leaves_every_bit_of_a_gradient(dtype, values):
    weight = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    weight.grad = torch.tensor(values, dtype=dtype)
    before = weight.grad.clone()

    UnitLossScaler().unscale_(torch.optim.SGD([weight], lr=1.0))

    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[before.element_size()]
    assert torch.equal(weight.grad.view(width), before.view(width))


def test_a_non_finite_gradient_is_found_on_every_path_and_dtype():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        weight = nn.Parameter(torch.ones(2, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        scaler = UnitLossScaler()

        assert not train_step(scaler, weight, optimizer, math.nan)

        assert weight.tolist() == [1.0, 1.0]
        assert scaler.state_dict()["num_skipped"] == 1


def test_gradients_of_mixed_dtypes_are_unscaled_in_one_call():
    wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    narrow = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([wide, narrow], lr=1.0)
    scaler = DynamicLossScaler(8.0)
    scaler.scale(wide.sum() + narrow.double().sum()).backward()

    scaler.unscale_(optimizer)

    assert wide.grad.tolist() == narrow.grad.tolist() == [1.0, 1.0]


def test_the_stored_values_of_a_sparse_gradient_are_unscaled():
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    scaler = DynamicLossScaler(8.0)
    scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()

    scaler.unscale_(optimizer)

    assert table.weight.grad.to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0, 0.0]


def test_arguments_of_step_reach_the_optimizer_and_closures_do_not():
    seen = []

    class Recording(torch.optim.SGD):
        def step(self, *args, **kwargs):
            seen.append((args, kwargs))

    weight = nn.Parameter(torch.ones(1))
    optimizer = Recording([weight], lr=1.0)
    scaler = UnitLossScaler()

    assert scaler.step(optimizer, None, extra=3)
    scaler.update()

    assert seen == [((None,), {"extra": 3})]
    with pytest.raises(PrecisionError, match="closure"):
        scaler.step(optimizer, lambda: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init_scale": 0.0}, "scale must be positive"),
        ({"init_scale": 1e39}, "finite in float32"),
        ({"growth_factor": 1.0}, "growth_factor must be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor must be between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval must be a whole number"),
        ({"growth_interval": 2.0}, "growth_interval must be a whole number"),
        ({"init_scale": 0.5}, "min_scale must be between 0 and init_scale"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, message):
    with pytest.raises(PrecisionError, match=message):
        DynamicLossScaler(**arguments)


@pytest.mark.parametrize("entry", ["growth_interval", "_growth_tracker", "scale"])
def test_an_incomplete_state_is_refused_and_changes_nothing(entry):
    scaler = DynamicLossScaler(64.0)
    state = DynamicLossScaler(2.0, growth_interval=7).state_dict()
    before = scaler.state_dict()
    del state[entry]

    with pytest.raises(PrecisionError, match=entry):
        scaler.load_state_dict(state)

    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    "damage",
    [
        {"scale": "8.0"},
        {"scale": None},
        {"scale": 10**400},
        {"growth_factor": "2"},
        {"backoff_factor": []},
        {"num_applied": -1},
        {"num_skipped": 0.5},
        {"_growth_tracker": None},
        {"_growth_tracker": float("inf")},
        {"_hysteresis_tracker": {}},
        {"min_scale": float("nan")},
        {"min_scale": "1"},
    ],
)
def test_a_state_with_a_value_of_another_kind_is_refused_and_changes_nothing(damage):
    scaler = DynamicLossScaler(64.0)
    before = scaler.state_dict()

    with pytest.raises(PrecisionError, match=next(iter(damage))):
        scaler.load_state_dict({**DynamicLossScaler(2.0).state_dict(), **damage})

    assert scaler.state_dict() == before


@pytest.mark.parametrize("make", [DynamicLossScaler, UnitLossScaler, lambda: StaticLossScaler(4.0)])
def test_what_is_no_dictionary_is_no_state_of_a_scaler(make):
    for state in (None, 7, "scale", ["scale"]):
        with pytest.raises(PrecisionError, match="state"):
            make().load_state_dict(state)


def test_a_unit_scaler_refuses_the_state_of_another_scale():
    with pytest.raises(PrecisionError, match="resume with the scaler"):
        UnitLossScaler().load_state_dict(StaticLossScaler(8.0).state_dict())


def test_the_norm_of_scaled_gradients_is_given_back_in_true_units():
    scaler = StaticLossScaler(2.0**10)

    assert scaler.unscaled(torch.tensor(2.0**11, dtype=torch.float64)).item() == 2.0


def test_a_scale_that_moves_between_forward_and_backward_disturbs_no_graph():
    weight = nn.Parameter(torch.ones(1))
    scaler = DynamicLossScaler(8.0)
    waiting = scaler.scale(weight.sum())
    other = nn.Parameter(torch.ones(1))
    train_step(scaler, other, torch.optim.SGD([other], lr=1.0), INF)

    waiting.backward()

    assert weight.grad.item() == 8.0


def test_scaling_and_unscaling_never_make_the_host_wait():
    # Meta tensors have no values: reading one back raises.
    weight = nn.Parameter(torch.ones(3, device="meta"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = DynamicLossScaler()

    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    given = DynamicLossScaler()
    given.unscale_(optimizer, non_finite=torch.zeros((), device="meta"))

    assert given.unscaled(weight.grad).device.type == "meta"
    with pytest.raises(RuntimeError, match="meta"):
        scaler.step(optimizer)
