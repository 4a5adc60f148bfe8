"""A step that skips by itself does what a step that waits does, bit for bit."""

import copy
import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.collectives import LocalWorld
from trainwright.precision import (
    BFloat16Moments,
    DynamicLossScaler,
    Hysteresis,
    LossScaleError,
    MasterWeights,
    PrecisionError,
    ScalerOrderError,
    passing,
)

ADAM = functools.partial(torch.optim.Adam, lr=0.1, fused=True, weight_decay=0.1, amsgrad=True)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.1, fused=True)
KINDS = ("adam", "adamw", "masters", "masters in pieces")


class NoWait(TorchDispatchMode):
    """Refuses to bring a number to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def made(kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in [(3, 5), (4,)]]
    if kind in ("adam", "adamw"):
        weights = [nn.Parameter(value) for value in values]
        return weights, (ADAM if kind == "adam" else ADAMW)(weights)
    weights = [nn.Parameter(value.bfloat16()) for value in values]
    named = [(f"w{number}", weight) for number, weight in enumerate(weights)]
    return weights, MasterWeights(named, ADAM if kind == "masters" else ADAMW)


def run(kind, overflows, deferred, scaler):
    """Train on drawn gradients, of which some overflow; ``deferred`` says which steps are."""
    weights, optimizer = made(kind)
    generator = torch.Generator().manual_seed(1)
    verdicts = []
    for bad, defers in zip(overflows, deferred, strict=True):
        optimizer.zero_grad()
        drawn = [torch.randn(w.shape, generator=generator) for w in weights]
        loss = sum((w * g).sum() for w, g in zip(weights, drawn, strict=True))
        scaler.scale(loss.float()).backward()
        if bad:
            weights[-1].grad[0] = math.inf if bad == 1 else math.nan
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, 2.0)
        verdicts.append((scaler.step_deferred if defers else scaler.step)(optimizer))
        scaler.update()
    return weights, optimizer, [bool(verdict) for verdict in verdicts]


def tensors_of(weights, optimizer):
    states = [value for weight in weights for value in optimizer.state[weight].values()]
    masters = list(optimizer.state_dict().get("masters", {}).values())
    return [*weights, *masters, *states]


@given(
    kind=st.sampled_from(KINDS),
    overflows=st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=3, max_size=12),
    which=st.sampled_from(["all", "some"]),
    hysteresis=st.sampled_from([1, 2, Hysteresis(2, refills=True)]),
    growth=st.sampled_from([2.0, 1.7, 2.0**127]),
)
def test_a_deferred_step_is_a_step_that_waited_bit_for_bit(
    kind, overflows, which, hysteresis, growth
):
    overflows = [0, *overflows]  # the first makes the states
    make = functools.partial(
        *(DynamicLossScaler, 2.0**10, growth, 0.3, 2), hysteresis=hysteresis, min_scale=0.0
    )
    waiting, going = make(), make()
    none, some = [False] * len(overflows), [which == "all" or n % 3 > 0 for n in range(20)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passing, "_PIECE", 4 if kind == "masters in pieces" else 1 << 18)
        weights, optimizer, applied = run(kind, overflows, none, waiting)
        others, other, verdicts = run(kind, overflows, some[: len(overflows)], going)

    assert verdicts == applied
    pairs = zip(tensors_of(weights, optimizer), tensors_of(others, other), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert going.state_dict() == waiting.state_dict()
    assert (going.num_applied, going.num_skipped) == (waiting.num_applied, waiting.num_skipped)


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_in_the_first_step_leaves_moments_of_zero(kind):
    weights, optimizer, verdicts = run(kind, [1], [True], DynamicLossScaler())

    assert verdicts == [False]
    fresh, _ = made(kind)
    assert all(torch.equal(one, two) for one, two in zip(weights, fresh, strict=True))
    states = [value for w in weights for value in optimizer.state[w].values()]
    assert all((value == 0).all() for value in states)


@pytest.mark.parametrize("kind", KINDS)
def test_no_number_is_brought_to_the_host(kind):
    weights, optimizer = made(kind)
    scaler = DynamicLossScaler(growth_interval=2)
    verdicts = []

    with NoWait():
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(sum(w.float().sum() for w in weights)).backward()
            verdicts.append(scaler.step_deferred(optimizer))
            scaler.unscaled(weights[0].grad.norm())
            scaler.update()

    assert all(verdicts)
    assert scaler.get_scale() == 2.0**18


def test_a_scale_below_its_bound_is_an_error_of_the_next_update():
    weights, optimizer = made("adamw")
    scaler = DynamicLossScaler(4.0, min_scale=2.0, named_parameters=[("second", weights[1])])

    def step():
        optimizer.zero_grad()
        scaler.scale(sum(w.sum() for w in weights)).backward()
        weights[1].grad[0] = torch.nan
        scaler.step_deferred(optimizer)
        scaler.update()

    step()
    step()
    with pytest.raises(LossScaleError, match=r"from 2\.0 to 1\.0.*that of second"):
        step()

    assert scaler.get_scale() == 2.0
    assert (scaler.num_applied, scaler.num_skipped) == (0, 2)


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda w: torch.optim.SGD([w], lr=1.0, momentum=0.9, fused=True),
        lambda w: torch.optim.AdamW([w], lr=1.0, foreach=True),
        lambda w: MasterWeights([("w", w)], ADAMW, moments=BFloat16Moments()),
        lambda w: MasterWeights([("w", w)], functools.partial(torch.optim.SGD, lr=1.0)),
    ],
    ids=["fused sgd", "foreach", "moments of 16 bits", "masters under sgd"],
)
def test_an_optimizer_that_cannot_skip_by_itself_is_waited_for(optimizer_of):
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = optimizer_of(weight), DynamicLossScaler(8.0)
    for bad in (True, False):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        weight.grad[0] += torch.inf if bad else 0.0
        before = weight.detach().clone()
        verdict = scaler.step_deferred(optimizer)
        scaler.update()
        assert bool(verdict) is not bad
        assert torch.equal(weight, before) is bad
    assert scaler.get_scale() == 4.0


def test_ranks_and_optimizers_share_a_deferred_decision():
    def step(communicator):
        scaler = DynamicLossScaler(8.0, communicator=communicator)
        pairs = [made("adamw"), made("masters")]
        before = [w.detach().clone() for weights, _ in pairs for w in weights]
        for weights, _ in pairs:
            scaler.scale(sum(w.float().sum() for w in weights)).backward()
            if communicator.rank == 1 and weights[0].dtype is torch.bfloat16:
                weights[0].grad[0] = torch.inf
        for _, optimizer in pairs:
            scaler.unscale_(optimizer)
        verdicts = [bool(scaler.step_deferred(optimizer)) for _, optimizer in pairs]
        scaler.update()
        after = [w for weights, _ in pairs for w in weights]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return verdicts, same, scaler.get_scale()

    assert LocalWorld(2).run(step) == [([False, False], True, 4.0)] * 2


def test_the_order_of_calls_is_kept():
    weights, optimizer = made("adamw")
    scaler = DynamicLossScaler()
    scaler.scale(weights[0].sum()).backward()
    scaler.step_deferred(optimizer)

    with pytest.raises(ScalerOrderError, match="called on this optimizer"):
        scaler.step_deferred(optimizer)
    scaler.update()
    with pytest.raises(ScalerOrderError, match="without step"):
        scaler.update()
    with pytest.raises(PrecisionError, match="no closure"):
        scaler.step_deferred(optimizer, closure=lambda: None)


def test_a_state_loaded_after_a_deferred_step_is_the_one_that_counts():
    scaler, other = DynamicLossScaler(8.0), DynamicLossScaler(64.0)
    run("adamw", [0, 1], [True, True], scaler)

    scaler.load_state_dict(other.state_dict())

    assert scaler.get_scale() == 64.0
    assert scaler.scale(torch.ones(())).item() == 64.0


@pytest.mark.parametrize("unscales", [True, False])
def test_the_masters_skip_and_unscale_as_torch_tells_them(unscales):
    ours, theirs = made("masters in pieces"), made("masters in pieces")
    scaler, oracle = torch.amp.GradScaler("cpu", 8.0), DynamicLossScaler(8.0)
    for bad in (False, True, False, False):
        for (weights, optimizer), scale in ((ours, scaler), (theirs, oracle)):
            optimizer.zero_grad()
            scale.scale(sum((w.float() ** 2).sum() for w in weights)).backward()
            if bad:
                weights[0].grad[0, 0] = torch.inf
            if unscales:
                scale.unscale_(optimizer)
            scale.step(optimizer)
            scale.update()

    pairs = zip(tensors_of(*ours), tensors_of(*theirs), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert scaler.get_scale() == oracle.get_scale()
    copy.deepcopy(ours[1].state_dict())
