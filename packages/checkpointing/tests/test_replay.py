"""A recomputation sees what the forward saw, changes nothing twice, or says that it cannot."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from trainwright.checkpointing.activations import (
    decide_once,
    keep_all,
    measure,
    recompute,
    recompute_all,
    recompute_except,
    recompute_sqrt,
    selective,
)
from trainwright.checkpointing.errors import ReplayError
from trainwright.collectives import LocalWorld

POLICIES = {
    "full": recompute_all(),
    "sqrt": recompute_sqrt(),
    "selective": selective(),
    "verified": recompute_all(verify=True),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Normed(nn.Module):
    """Batch norm, whose kernel changes statistics without counting a version, and a counter."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.ones(4))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.calls += 1
        self.replaced = self.replaced * 2
        # Depends on the buffers: a recomputation must see them as the forward did.
        return self.norm(self.linear(x)).tanh() * self.calls.clone() + self.replaced.sin()


@every_policy
def test_buffers_are_updated_once_and_seen_as_they_were_with_microbatches_in_flight(policy):
    def run(runner, order):
        layers = [Normed(), Normed()]
        inputs = [torch.full((3, 4), 0.1 * m) + torch.eye(3, 4) for m in range(3)]
        outputs = [runner(layers, x) for x in inputs]
        for m in order:
            outputs[m].square().sum().backward()
        grads = [p.grad for layer in layers for p in layer.parameters()]
        return grads + [b for layer in layers for b in layer.buffers()]

    # Whichever comes last leaves nothing of what it saw.
    for order in ((1, 0, 2), (2, 1, 0)):
        assert equal(run(policy, order), run(keep_all(), order))


def test_a_large_buffer_changed_between_the_runs_by_others_is_an_error():
    layer = nn.Linear(4, 4)
    layer.register_buffer("table", torch.ones(200, 200))
    layer.register_buffer("counter", torch.ones(2))
    y = recompute(layer)(torch.ones(2, 4, requires_grad=True))

    layer.counter.add_(1)  # small ones are remembered
    layer.table.add_(1)

    with pytest.raises(ReplayError, match=r"buffer .*table was changed"):
        y.sum().backward()


class Drawing(nn.Module):
    """Dropout from a generator of the module's own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x, noise=None):
        y = x * torch.bernoulli(torch.full_like(x, 0.5), generator=self.generator)
        return y.exp() if noise is None else y * torch.rand(x.shape, generator=noise) * x


@every_policy
def test_generators_of_modules_arguments_and_closures_are_replayed_and_left_where_plain_would(
    policy,
):
    def run(runner):
        layer, noise, closed = Drawing(), torch.Generator(), torch.Generator()
        noise.manual_seed(4), closed.manual_seed(5)
        x = torch.rand(40, requires_grad=True)
        with torch.no_grad():
            x.copy_(torch.linspace(0, 1, 40))
        product = lambda x: (x.reshape(5, 8) @ torch.eye(8)).reshape(40)  # noqa: E731
        outputs = [runner([product, layer], x)]
        outputs.append(runner([lambda x, noise: product(layer(x, noise))], x, noise=noise))
        draw = lambda x: product(x).sin() * torch.rand(40, generator=closed)  # noqa: E731
        outputs.append(runner([draw], x))
        outputs.append(runner([functools.partial(draw)], x))
        sum(outputs).square().sum().backward()
        return [x.grad, layer.generator.get_state(), noise.get_state(), closed.get_state()]

    assert equal(run(policy), run(keep_all()))


def test_randomness_that_cannot_be_replayed_is_an_error_where_it_is_verified():
    def draws(x):
        return x.sin() * random.random() * x

    y = recompute(draws, verify=True)(torch.ones(3, requires_grad=True))
    with pytest.raises(ReplayError, match="has other values in the recomputation"):
        y.sum().backward()


HIDDEN = {"generator": torch.Generator()}


def test_a_generator_that_nothing_leads_to_is_an_error_of_the_forward():
    def draws(x):
        return x.sin() * torch.bernoulli(torch.full((3,), 0.5), generator=HIDDEN["generator"]) * x

    x = torch.ones(3, requires_grad=True)
    for policy in (recompute_all(), selective(), recompute_sqrt()):
        with pytest.raises(ReplayError, match=r"bernoulli.* draws from a generator that"):
            policy([draws], x)


def test_hidden_generators_that_later_runs_draw_from_are_an_error_where_it_is_verified():
    def draws(x, late):
        mask = torch.rand(40, generator=HIDDEN["generator"]) > 0.5 if late else 1
        return x.sin() * mask * x

    call = recompute(draws, verify=True)
    call(torch.ones(40, requires_grad=True), late=False).sum().backward()
    y = call(torch.ones(40, requires_grad=True), late=True)
    with pytest.raises(ReplayError, match="hidden generator"):
        y.sum().backward()


class Router(nn.Module):
    """Two experts, told apart by a near tie that would fall otherwise at each call."""

    def __init__(self, seen):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.gate = nn.Linear(4, 2)
        self.calls = 0
        self.seen = seen

    def decide(self, logits):
        self.calls += 1
        tilted = logits.detach() * 0
        tilted[:, self.calls % 2] += 1e-7
        chosen = tilted.argmax(-1)
        return {"chosen": chosen, "counts": torch.bincount(chosen, minlength=2).tolist()}

    def forward(self, x):
        logits = self.gate(x)
        decision = decide_once(lambda: self.decide(logits))
        self.seen.append(decision["counts"])
        weight = logits.softmax(-1).gather(-1, decision["chosen"][:, None])
        parts = x[decision["chosen"].argsort()].split(decision["counts"])
        return torch.cat([e(p) for e, p in zip(self.experts, parts, strict=True)]).tanh() * weight


@every_policy
def test_decisions_are_kept_so_that_the_same_experts_are_recomputed(policy):
    def run(runner, layers=2):
        seen = []
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        stack = [Router(seen) for _ in range(layers)]
        runner(stack, x).square().sum().backward()
        grads = [p.grad for layer in stack for p in layer.parameters()]
        return seen[:layers], seen[layers:], [x.grad, *(g for g in grads if g is not None)]

    forward, _, expected = run(keep_all())
    same, again, found = run(policy)
    assert same == forward
    assert all(counts in forward for counts in again)
    assert len(again) == 2
    assert equal(found, expected)


def test_decisions_hold_in_nested_regions_at_every_depth():
    seen = []
    router = Router(seen)
    inner = recompute(router)
    outer = recompute(lambda x: inner(inner(x) + 1).sin())
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    outer(x).sum().backward()
    assert router.calls == 2  # decided twice, in the forward
    assert len(seen) > 4
    assert {tuple(c) for c in seen[::2]} != {tuple(c) for c in seen[1:2]}


def test_a_decision_that_needs_a_gradient_or_was_changed_or_is_missing_is_an_error():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ReplayError, match="needs a gradient"):
        recompute(lambda x: decide_once(lambda: x * 2))(x)

    def changes(x):
        decision = decide_once(lambda: torch.ones(3))
        y = x.sin() * decision * x
        decision.add_(1)
        return y

    with pytest.raises((ReplayError, RuntimeError), match=r"changed in place|inplace operation"):
        recompute(changes)(x).sum().backward()

    more = iter([1, 2])

    def asks_more(x):
        for _ in range(next(more)):
            decide_once(lambda: 1)
        return x.sin() * x

    with pytest.raises(ReplayError, match="asks for decision 2, but the forward made 1"):
        recompute(asks_more)(x).sum().backward()


def test_outside_of_regions_decisions_are_plain_calls():
    assert decide_once(lambda: 5) == 5
    x = torch.ones(2, requires_grad=True)
    assert decide_once(lambda: x * 2).requires_grad


def test_kept_decisions_are_measured():
    with measure() as kept:
        y = recompute(lambda x: x.sin() * decide_once(lambda: torch.ones(100)) * x)(
            torch.ones(100, requires_grad=True)
        )
    assert kept.live_bytes == 400 + 400
    y.sum().backward()
    del y
    assert kept.live_bytes == 0


def _route_with_exchange(comm, policy):
    """Experts on ranks: sizes of what is exchanged are decided once, so nobody waits for ever."""

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, counts):
            ctx.counts = counts
            out = torch.empty_like(x)
            comm.all_to_all(out, x.contiguous()).wait()
            return out

        @staticmethod
        def backward(ctx, grad):
            out = torch.empty_like(grad)
            comm.all_to_all(out, grad.contiguous()).wait()
            return out, None

    calls = []

    def layer(x):
        calls.append(0)
        rows = decide_once(lambda: 2 * len(calls))
        y = Exchange.apply(x[:rows].sin(), rows)
        return F.pad(y, (0, 0, 0, len(x) - rows)).exp() * x

    x = torch.arange(16.0).view(8, 2).div(16).add(comm.rank).requires_grad_()
    y = policy([layer], x)
    y.sum().backward()
    return [y.detach(), x.grad]


def test_ranks_that_exchange_what_they_decided_on_do_not_hang():
    plain = LocalWorld(2).run(_route_with_exchange, keep_all())
    found = LocalWorld(2).run(_route_with_exchange, recompute_all())
    assert all(equal(a, b) for a, b in zip(plain, found, strict=True))


class Gathered(nn.Module):
    """A unit whose weights exist only while it runs, as in ZeRO-3; storages are resized."""

    def __init__(self, frozen):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.inner = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        if frozen:
            self.inner[0].requires_grad_(False)
        self.shards = [p.detach().clone() for p in self.inner.parameters()]
        self.release()
        self.register_forward_pre_hook(lambda *_: self.gather())
        self.register_forward_hook(lambda *_: self.release())

    def gather(self):
        for parameter, shard in zip(self.inner.parameters(), self.shards, strict=True):
            storage = parameter.untyped_storage()
            if not storage.size():
                storage.resize_(shard.numel() * 4)
                with torch.autograd._unsafe_preserve_version_counter(parameter):
                    parameter.detach().copy_(shard)

    def release(self):
        for parameter in self.inner.parameters():
            parameter.untyped_storage().resize_(0)

    def forward(self, x):
        y = x + self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.gather())
        return y


@pytest.mark.parametrize("frozen", [False, True])
@every_policy
def test_weights_that_come_and_go_are_there_in_the_recomputation(policy, frozen):
    def run(runner):
        layers = nn.ModuleList(Gathered(frozen) for _ in range(3))
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        runner(layers, x).square().sum().backward()
        return [x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]

    expected = run(keep_all())
    assert len(expected) == 1 + 3 * (2 if frozen else 4)
    assert equal(run(policy), expected)


class Owing(TorchFunctionMode):
    """Splits the backward of products: input gradients at once, weight gradients later."""

    def __init__(self):
        super().__init__()
        self.owed = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and torch.is_grad_enabled():
            return _Split.apply(self, *args)
        return func(*args, **(kwargs or {}))


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, owing, x, weight, bias):
        ctx.owing, ctx.weight, ctx.bias = owing, weight, bias
        ctx.save_for_backward(x)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.owing.owed.append((ctx.weight, ctx.bias, x, grad))
        return None, grad @ ctx.weight, None, None


@every_policy
def test_a_split_backward_owes_the_same_weight_gradients(policy):
    def run(runner):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)]
        owing = Owing()
        inputs = [torch.full((2, 4), 0.3 * m).requires_grad_() for m in range(2)]
        with owing:
            outputs = [runner(layers, x).square().sum() for x in inputs]
        gradients = [torch.autograd.grad(y, x)[0] for y, x in zip(outputs, inputs, strict=True)]
        assert len(owing.owed) == 8  # nothing is owed twice
        for weight, bias, x, grad in owing.owed:
            gradients += [grad.T @ x, grad.sum(0)]
            assert weight.grad is None
            assert bias.grad is None
        return gradients

    assert equal(run(policy), run(keep_all()))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@every_policy
def test_compiled_units_are_recomputed_bitwise(policy, backend):
    def run(runner):
        torch._dynamo.reset()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)]
            compiled = [torch.compile(layer, backend=backend) for layer in layers]
            x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
            torch.manual_seed(4)
            y = runner(compiled, x)
            y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for layer in layers for p in layer.parameters())]

    assert equal(run(policy), run(keep_all()))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_dropout_gradients_are_the_same_whatever_share_of_operators_is_kept(share):
    def block(x):
        return F.dropout(F.gelu(x @ torch.eye(6) * 2), 0.5) + x

    names = ["mm", "gelu", "mul", "add"]

    def run(policy):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
            policy([block] * 3, x).square().sum().backward()
        return [x.grad]

    kept = names[: round(share * len(names))]
    policy = recompute_except(kept) if kept else recompute_all()
    assert equal(run(policy), run(keep_all()))
