"""Selective recomputation keeps what was named, runs the rest again, and changes no bit."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.checkpointing.activations import (
    CastBFloat16,
    Compress,
    OperatorReport,
    keep_all,
    measure,
    offload_to_cpu,
    recompute_all,
    recompute_except,
    selective,
)
from trainwright.checkpointing.errors import PolicyError, ReplayError


class Counting(TorchDispatchMode):
    """Counts how often operators run."""

    def __init__(self, *operators):
        super().__init__()
        self.operators = operators
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.operators
        return func(*args, **(kwargs or {}))


def three_products(x):
    w = torch.eye(4)
    return ((x @ w).sin() @ w).sin() @ w


def run(policy, layers, x, **kwargs):
    """Outputs, gradients of the input and of parameters, and the generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        x = x.clone().requires_grad_()
        y = policy(layers, x, **kwargs)
        y.float().square().sum().backward()
        parameters = [p for m in layers if isinstance(m, nn.Module) for p in m.parameters()]
        found = [y.detach(), x.grad, *(p.grad for p in parameters), torch.rand(2)]
        for parameter in parameters:
            parameter.grad = None
    return found


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


SPELLINGS = [
    "mm",
    "aten.mm",
    "aten::mm",
    "aten.mm.default",
    "torch.ops.aten.mm.default",
    "matmul",
    "linear",
    torch.matmul,
    torch.ops.aten.mm,
    torch.ops.aten.mm.default,
    torch.ops.aten.matmul,
]


@pytest.mark.parametrize(
    "spelling", SPELLINGS, ids=lambda spelling: getattr(spelling, "__name__", spelling)
)
def test_a_product_that_is_kept_runs_once_however_it_is_spelt(spelling):
    forward = Counting(torch.ops.aten.mm.default)
    x = torch.ones(3, 4, requires_grad=True)

    with forward:
        y = recompute_except([spelling])([three_products], x)
        in_forward = forward.count
        # The backward itself multiplies once for each gradient of x.
        y.sum().backward()

    assert in_forward == 3
    assert forward.count == 3 + 3


def test_without_keeping_products_run_twice():
    counting = Counting(torch.ops.aten.mm.default)
    x = torch.ones(3, 4, requires_grad=True)

    with counting:
        recompute_all(early_stop=False)([three_products], x).sum().backward()

    assert counting.count == 3 + 3 + 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("matmull", "did you mean matmul"),
        ("aten.mm.nothing", "there is no operator"),
        ("nowhere.mm", "there is no operator"),
        ("view", "gives a view"),
        ("relu_", "changes its arguments"),
        ("cross_entropy_loss", "made of other operators"),
        ("", "there is no operator"),
        (7, "given by its name"),
    ],
)
def test_a_name_that_nothing_can_match_is_refused(name, reason):
    with pytest.raises(PolicyError, match=reason):
        recompute_except([name])


def test_a_single_name_and_no_name_are_refused():
    with pytest.raises(PolicyError, match=r"write \['mm'\]"):
        recompute_except("mm")
    with pytest.raises(PolicyError, match="no operator is named"):
        recompute_except([])


@pytest.mark.parametrize("policy", [recompute_except(["convolution", "mm"]), selective()])
def test_a_name_that_no_layer_runs_is_an_error_and_not_silently_full_recomputation(policy):
    def without(x):
        return x.sin()

    with pytest.raises(PolicyError, match="is to be kept, but no layer runs it"):
        policy([without], torch.ones(2, requires_grad=True))


def test_reports_count_what_was_kept_and_what_was_recomputed():
    report = OperatorReport()
    x = torch.ones(3, 4, requires_grad=True)

    recompute_except(["mm"], report=report)([three_products], x).sum().backward()

    assert report.kept == {"mm": 3}
    assert report.recomputed["sin"] == 2
    assert "mm" not in report.recomputed


class Block(nn.Module):
    """Attention with matrices, a norm and an MLP, with dropout in three places."""

    def __init__(self, dim, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.norm = nn.LayerNorm(dim)
            self.qkv = nn.Linear(dim, 3 * dim)
            self.up = nn.Linear(dim, 2 * dim)
            self.down = nn.Linear(2 * dim, dim)

    def forward(self, x, p=0.3):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = F.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), p)
        x = x + F.dropout(weights @ v, p)
        return x + F.dropout(self.down(F.gelu(self.up(x))), p)


NAMES = ["addmm", "bmm", "softmax", "gelu", "layer_norm", "add", "mul", "empty_like"]


@settings(max_examples=6)
@given(names=st.sets(st.sampled_from(NAMES), min_size=1), seed=st.integers(0, 99))
def test_whatever_is_kept_outputs_gradients_and_the_generator_are_bitwise_those_of_keeping_all(
    names, seed
):
    layers = [Block(6, seed + i) for i in range(2)]
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(seed))
    expected = run(keep_all(), layers, x)
    assert equal(run(recompute_except(sorted(names), verify=True), layers, x), expected)


def test_selective_recomputes_the_attention_core_norms_and_activations_and_keeps_products():
    report = OperatorReport()
    layers = [Block(8)]
    x = torch.randn(2, 16, 8)
    assert equal(run(selective(report=report), layers, x), run(keep_all(), layers, x))

    assert report.kept == {"addmm": 3}
    for name in ("bmm", "_softmax", "gelu", "native_layer_norm", "bernoulli_.float"):
        assert report.recomputed[name] >= 1


def test_selective_keeps_more_than_full_and_less_than_all():
    layers = [Block(16, i) for i in range(3)]
    parameters = [p for layer in layers for p in layer.parameters()]

    def kept(policy):
        x = torch.randn(2, 24, 16, requires_grad=True)
        with measure(parameters) as bytes_, torch.random.fork_rng(devices=[]):
            y = policy(layers, x)
        assert y.requires_grad
        return bytes_.live_bytes

    full, some, everything = map(kept, (recompute_all(), selective(), keep_all()))
    # Inputs, and results of three products a layer: 3 + 2 + 1 times the input each.
    stream = 2 * 24 * 16 * 4
    assert full == 3 * stream
    assert some == 3 * (1 + 3 + 2 + 1) * stream
    assert some < everything / 2


def test_what_draws_random_numbers_is_replayed_even_if_it_is_named():
    def layer(x):
        y = torch.native_dropout(x, 0.5, True)[0]
        return torch.native_dropout(y * x, 0.5, True)[0] * x

    report = OperatorReport()
    policy = recompute_except(["native_dropout", "mul"], report=report, early_stop=False)
    x = torch.rand(64) + 1

    assert equal(run(policy, [layer], x), run(keep_all(), [layer], x))
    assert "native_dropout" not in report.kept


@pytest.mark.parametrize("change", [torch.relu_, lambda y: y.mul_(3), lambda y: y[1:].fill_(2)])
def test_a_kept_result_that_the_layer_changes_in_place_is_given_as_it_was(change):
    weight = nn.Parameter(torch.randn(4, 4))

    def layer(x):
        y = x @ weight
        change(y)
        return y.exp() * x

    x = torch.randn(3, 4)
    for policy in (recompute_except(["mm"]), recompute_except({"mm": offload_to_cpu()})):
        assert equal(run(policy, [layer], x), run(keep_all(), [layer], x))


def test_a_kept_result_changed_after_the_layer_is_an_error():
    x = torch.ones(3, 4, requires_grad=True)

    def layer(x):
        y = x.sin() @ torch.eye(4)
        return y, y.sin()

    y, z = recompute_except(["mm"])([layer], x)

    with torch.no_grad():
        y.add_(1)

    with pytest.raises(ReplayError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_layer_that_takes_another_way_in_the_recomputation_is_an_error():
    ways = iter([(3, 4), (4, 4), (3, 4)])

    def layer(x):
        rows, _ = next(ways)
        return (x.sin()[:rows] @ torch.eye(4)).sin().sum()

    y = recompute_except(["mm"])([layer], torch.ones(5, 4, requires_grad=True))

    with pytest.raises(ReplayError, match="run 1 of mm has arguments"):
        y.backward()


def test_the_graph_can_be_walked_twice():
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    y = recompute_except(["mm"])([lambda x: (x @ weight).relu_().exp() @ weight], x)

    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)

    assert torch.equal(first, second)


def test_operators_are_held_by_keepers_of_their_own():
    to_host = offload_to_cpu()
    policy = recompute_except({"addmm": to_host, "gelu": Compress(CastBFloat16(), min_bytes=0)})
    layers = [Block(8)]
    x = torch.randn(2, 16, 8, requires_grad=True)

    with measure(layers[0].parameters()) as kept, torch.random.fork_rng(devices=[]):
        y = policy(layers, x)

    stream = 2 * 16 * 8
    assert kept.live_bytes == stream * 4 + 2 * stream * 2  # the input; gelu in two bytes
    assert to_host.storage.held_bytes == (3 + 2 + 1) * stream * 4
    y.sum().backward()
    del y
    assert to_host.storage.held_bytes == 0


def test_nothing_lives_on_when_the_graph_is_gone():
    layers = [Block(8)]
    x = torch.randn(2, 4, 8, requires_grad=True)
    with measure([x, *layers[0].parameters()]) as kept, torch.random.fork_rng(devices=[]):
        y = selective()(layers, x)
    assert kept.live_bytes > 0
    del y  # without a backward, and without the collector of cycles
    assert kept.live_bytes == 0
