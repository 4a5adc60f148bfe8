"""Plans are carried out as they say: bitwise, within the budget, with the bytes they count."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.checkpointing.activations import (
    apply,
    default_store,
    follow,
    keep_all,
    keep_shards,
    measure,
    offload_to_folder,
    parse_policy,
    recompute_all,
    recompute_every,
    within_budget,
)
from trainwright.checkpointing.activations.planning.chain import plan_chain
from trainwright.checkpointing.activations.planning.choices import Compress, Offload, Partial
from trainwright.checkpointing.activations.planning.costs import (
    ChainCosts,
    LayerCost,
    OperatorCosts,
)
from trainwright.checkpointing.activations.planning.operators import plan_operators
from trainwright.checkpointing.activations.planning.plan import (
    ChainPlan,
    Kept,
    OperatorDecision,
    OperatorPlan,
    Region,
)
from trainwright.checkpointing.activations.planning.presets import recursive_plan
from trainwright.checkpointing.activations.planning.profile_operators import profile_operators
from trainwright.checkpointing.activations.planning.simulate import simulate_chain
from trainwright.checkpointing.errors import (
    InfeasibleBudgetError,
    PlanError,
    PolicyError,
    ReplayError,
)
from trainwright.checkpointing.testing.runners import LAYER_RUNNER_LAWS
from trainwright.collectives import LocalWorld

ROWS = 16


class Layer(nn.Module):
    """An MLP of its own widths; sin and exp save their input or output, dropout draws."""

    def __init__(self, before, inner, after, drops):
        super().__init__()
        self.up = nn.Linear(before, inner)
        self.down = nn.Linear(inner, after)
        self.drops = drops

    def forward(self, x):
        y = torch.tanh(self.up(x).sin())
        if self.drops:
            y = nn.functional.dropout(y, 0.3)
        return self.down(y.exp())


@st.composite
def chains(draw):
    """A chain of layers, each fitting the next, and its input."""
    count = draw(st.integers(1, 6))
    widths = [8 * draw(st.integers(1, 8)) for _ in range(count + 1)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw(st.integers(0, 9)))
        layers = nn.Sequential(
            *(
                Layer(before, 8 * draw(st.integers(1, 10)), after, draw(st.booleans()))
                for before, after in itertools.pairwise(widths)
            )
        )
        return layers, torch.randn(ROWS, widths[0])


def costs_of(layers, x, choices=()):
    """Bytes as they are; times that favour whatever is drawn."""
    costs = []
    with torch.random.fork_rng(devices=[]):
        for layer in layers:
            source = x.detach().requires_grad_()
            with measure([*layer.parameters(), source]) as saved:
                x = layer(source)
            seconds = 1.0 + saved.live_bytes / 1e4
            costs.append(LayerCost("layer", seconds, 2.0, x.numel() * 4, saved.live_bytes))
    return ChainCosts(costs, costs_input(layers), choices)


def costs_input(layers):
    return ROWS * layers[0].up.in_features * 4


def step(call, layers, x):
    """All that a training step leaves, and the bytes that lived."""
    source = x.clone().requires_grad_()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        with measure(layers.parameters()) as saved:
            y = call(source)
        held = saved.live_bytes
        found = [y.detach().clone()]
        y.sum().backward()  # a sum saves nothing of y
        del y
        found += [source.grad, *(p.grad for p in layers.parameters()), torch.rand(1)]
    layers.zero_grad()
    return found, held, saved.peak_bytes


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@settings(max_examples=10)
@given(chain=chains(), share=st.floats(0.1, 1.1), offload=st.booleans())
def test_drawn_modules_by_their_best_plans_are_bitwise_and_stay_within_the_budget(
    chain, share, offload
):
    layers, x = chain
    costs = costs_of(layers, x, [Offload("cpu", 1e4, 1e4)] if offload else [])
    everything = costs.input_bytes + sum(c.saved_bytes + c.output_bytes for c in costs.layers)
    budget = int(everything * share)
    try:
        plan = plan_chain(costs, budget, steps=40)
    except InfeasibleBudgetError as error:
        budget = error.smallest_budget_bytes
        plan = plan_chain(costs, budget, steps=40)

    found, held, peak = step(apply(layers, plan), layers, x)

    expected, _, _ = step(layers, layers, x)
    assert equal(found, expected)
    assert peak <= budget
    simulated = simulate_chain(plan, costs)
    assert held <= simulated.held_bytes
    if not plan.stores:  # what comes back from elsewhere comes back piece by piece
        assert (peak, held) == (simulated.peak_bytes, simulated.held_bytes)


@st.composite
def items(draw, first, end, depth):
    """Kept layers and regions, nested."""
    found = []
    while first < end:
        stop = draw(st.integers(first + 1, end))
        if depth and draw(st.booleans()):
            found.append(Region(draw(items(first, stop, depth - 1))))
        else:
            found += [Kept(layer) for layer in range(first, stop)]
        first = stop
    return tuple(found)


@settings(max_examples=10)
@given(chain=chains(), data=st.data())
def test_any_nested_plan_is_bitwise_and_lives_on_the_bytes_that_its_simulation_counts(chain, data):
    layers, x = chain
    plan = ChainPlan(data.draw(items(0, len(layers), 3)))

    found, held, peak = step(apply(layers, plan), layers, x)

    simulated = simulate_chain(plan, costs_of(layers, x))
    assert equal(found, step(layers, layers, x)[0])
    assert (peak, held) == (simulated.peak_bytes, simulated.held_bytes)


def uniform(count):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(Layer(16, 16, 16, False) for _ in range(count)))


def test_each_level_of_a_plan_runs_its_layers_once_more():
    layers = uniform(7)
    runs = [0] * 7
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, n=number: runs.__setitem__(n, runs[n] + 1))
    plan = recursive_plan(7)

    apply(layers, plan)(torch.randn(ROWS, 16, requires_grad=True)).sum().backward()

    assert tuple(runs) == simulate_chain(plan, costs_of(uniform(7), torch.randn(ROWS, 16))).runs


def test_compressed_and_partly_recomputed_layers_stay_within_what_the_plan_counts(tmp_path):
    layers = uniform(4)
    x = torch.randn(ROWS, 16)
    plan = ChainPlan(
        [Kept(0, "int8"), Region([Kept(1)], "folder"), Kept(2, "selective"), Kept(3, "cpu")]
    )
    planned = apply(layers, plan, {"folder": offload_to_folder(tmp_path)})
    found, held, _ = step(planned, layers, x)

    costs = costs_of(layers, x)
    products = 2 * ROWS * 16 * 4
    choices = [Compress("int8", (1 + 4 / 128) / 4, 1, 1), Offload("cpu", 1, 1)]
    partial = [Partial("selective", products, 0.0)]
    with_choices = ChainCosts(
        [
            LayerCost(c.name, 1, 1, c.output_bytes, c.saved_bytes, partials=partial)
            for c in costs.layers
        ],
        costs.input_bytes,
        [*choices, Offload("folder", 1, 1)],
    )
    assert held <= simulate_chain(plan, with_choices).held_bytes
    expected = step(layers, layers, x)[0]
    assert torch.equal(found[0], expected[0])
    assert equal(found[-5:], expected[-5:])  # the last layer, behind the compressed one, is exact


@pytest.mark.parametrize("law", LAYER_RUNNER_LAWS, ids=lambda law: law.__name__)
def test_followed_plans_obey_the_laws_of_policies(law):
    plan = ChainPlan([Region([Region([Kept(0)]), Kept(1)]), Kept(2, "cpu"), Kept(3, "selective")])
    law(follow(plan), 4, 11)


def test_a_plan_for_another_module_or_with_an_unknown_store_is_refused():
    plan = ChainPlan([Kept(0), Region([Kept(1)])])
    with pytest.raises(PlanError, match="of 2 layers, the module has 3"):
        apply(uniform(3), plan)
    with pytest.raises(PlanError, match="of 2 layers, got 3"):
        follow(plan)(uniform(3), torch.ones(ROWS, 16, requires_grad=True))
    with pytest.raises(PlanError, match="give its layers"):
        apply(nn.Linear(2, 2), plan)
    elsewhere = ChainPlan([Kept(0, "nvme")])
    with pytest.raises(PlanError, match="say what that is"):
        follow(elsewhere)
    with pytest.raises(PlanError, match="a keeper or a rule"):
        follow(elsewhere, {"nvme": "disk"})
    assert default_store("cpu").hold(torch.ones(1)) is not None


@settings(max_examples=8)
@given(count=st.integers(1, 5), share=st.floats(0.3, 1.2))
def test_a_policy_within_a_budget_measures_once_then_plans_and_holds_the_budget(count, share):
    layers = uniform(count)
    x = torch.randn(ROWS, 16)
    expected, _, most = step(lambda x: keep_all()(layers, x), layers, x)
    _, _, least = step(lambda x: recompute_all()(layers, x), layers, x)
    policy = within_budget(max(least, int(most * share)))

    first, _, _ = step(lambda x: policy(layers, x), layers, x)
    second, _, peak = step(lambda x: policy(layers, x), layers, x)

    assert equal(first, expected)
    assert equal(second, expected)
    assert peak <= policy.budget_bytes
    assert len(policy.plans()) == 1
    if share >= 1:
        assert all(isinstance(item, Kept) for item in policy.plans()[0].items)


def test_a_budget_that_no_plan_holds_is_an_error_that_names_the_smallest():
    with pytest.raises(InfeasibleBudgetError, match="smallest budget that can be met"):
        parse_policy("budget:1KB")(uniform(3), torch.randn(ROWS, 16, requires_grad=True))


class Mixed(nn.Module):
    """Products, activations, a norm, and dropout in place."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.norm = nn.LayerNorm(16)
            self.up = nn.Linear(16, 32)
            self.down = nn.Linear(32, 16)

    def forward(self, x):
        y = nn.functional.gelu(self.up(self.norm(x)).sin())
        y = nn.functional.dropout(y.exp(), 0.3)
        return x + self.down(y).relu_()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 1.0])
def test_plans_of_operators_are_bitwise_and_hold_what_they_say(share, offload):
    module = Mixed()
    x = torch.randn(ROWS, 16)
    with torch.random.fork_rng(devices=[]):
        costs = profile_operators(module, (x.clone().requires_grad_(),), {}, 1)
    if offload:
        costs = OperatorCosts(costs.operators, [Offload("cpu", 1e9, 1e9)])
    everything = sum(operator.output_bytes for operator in costs.operators if operator.needed)
    try:
        plan = plan_operators(costs, int(share * everything))
    except InfeasibleBudgetError as error:
        plan = plan_operators(costs, error.smallest_budget_bytes)

    call = apply(module, plan)
    found, held, _ = step(call, module, x)

    assert equal(found, step(module, module, x)[0])
    assert held <= x.numel() * 4 + plan.claims.peak_bytes


def test_a_plan_of_operators_for_another_function_is_an_error():
    plan = OperatorPlan([OperatorDecision("mm.0", "keep"), OperatorDecision("gelu.0", "keep")])
    call = apply(lambda x: (x @ torch.eye(16)).exp(), plan)
    with pytest.raises(PlanError, match=r"gelu.*did not run"):
        call(torch.ones(2, 16, requires_grad=True))
    with pytest.raises(PlanError, match="a module or a function"):
        apply([nn.Linear(2, 2)], plan)


def _keep_inputs_as_shards(comm, shape, dtype, differ):
    generator = torch.Generator().manual_seed(1)
    layers = nn.ModuleList(nn.Tanh() for _ in range(4))
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    results = []
    for inputs in (None, keep_shards(comm)):
        source = x.detach().clone().requires_grad_()
        with torch.no_grad():
            source += comm.rank * differ
        with measure() as kept:
            y = recompute_every(2, inputs=inputs)(layers, source)
        num_bytes = kept.live_bytes
        y.float().square().sum().backward()
        results.append((y.detach(), source.grad, num_bytes))
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(("shape", "dtype"), [((5, 7), torch.float32), ((3, 4, 9), torch.bfloat16)])
def test_inputs_kept_as_shards_come_back_whole_and_take_a_share_of_the_bytes(world, shape, dtype):
    size = torch.Size(shape).numel() * dtype.itemsize
    for whole, shards in LocalWorld(world).run(_keep_inputs_as_shards, shape, dtype, 0):
        assert torch.equal(whole[0], shards[0])
        assert torch.equal(whole[1], shards[1])
        assert whole[2] == 2 * size
        part = -(-size // world)
        assert shards[2] <= 2 * (size if world == 1 else -(-part // 8) * 8 + 8)


def test_inputs_that_differ_between_ranks_are_no_shards_of_one_tensor():
    with pytest.raises(Exception, match="the ranks had different ones") as caught:
        LocalWorld(2).run(_keep_inputs_as_shards, (4, 4), torch.float32, 1)
    assert isinstance(caught.value, ReplayError) or "ReplayError" in str(caught.value)


def test_shards_need_a_communicator():
    with pytest.raises(PolicyError, match="needs a communicator"):
        keep_shards(2)
