"""Recomputation sends every token where the forward has sent it."""

import contextvars
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from trainwright.collectives import LocalWorld, random
from trainwright.sharding import Mesh, MeshShape, ShardingError
from trainwright.sharding.expert import (
    MixtureOfExperts,
    Routing,
    capture_routing,
    routing_contexts,
)


class FlippingRouter(torch.nn.Module):
    """Two experts that tie but for an epsilon, which turns round at each call."""

    e_score_correction_bias = None

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
        self.calls = 0

    def forward(self, hidden):
        self.calls += 1
        logits = hidden @ self.weight.T
        return logits + torch.tensor([0.0, 1e-7 if self.calls % 2 else -1e-7]).double()


def build(world, router=True):
    layer = MixtureOfExperts(
        3,
        4,
        Routing(2, 1, normalize=False),
        Mesh(world, MeshShape.parse(f"dp={world.size},ep={world.size}")),
        dtype=torch.float64,
    )
    layer.reset_parameters(random.Key(0, "layer"), 0.5)
    if router:
        layer.gate = FlippingRouter()
    return layer


def through_contexts(layer, hidden):
    return checkpoint(layer, hidden, use_reentrant=False, context_fn=routing_contexts)


def through_captures(layer, hidden):
    """What a policy with captures does: one call a forward, a context around a recomputation."""
    reenter = None

    def first(given):
        nonlocal reenter
        reenter = capture_routing()
        return layer(given)

    def region(given):
        if reenter is None:
            return contextvars.copy_context().run(first, given)
        with reenter():
            return layer(given)

    return checkpoint(region, hidden, use_reentrant=False)


def run_two_microbatches(world, runner):
    """Two micro-batches, the second one's backward first; all is kept without a runner."""
    layer = build(world)
    inputs, losses = [], []
    for index in range(2):
        key = random.Key(1, f"{index}")
        # The last rank has no tokens.
        rows = 0 if world.rank == world.size - 1 > 0 else 4
        inputs.append(random.normal(key, (1, rows, 3), dtype=torch.float64).requires_grad_())
        output, report = (layer if runner is None else functools.partial(runner, layer))(inputs[-1])
        losses.append(output.square().sum() + report.balance)
        counts = report.counts.tolist()
    for loss in reversed(losses):
        loss.backward()
    gradients = [p.grad.clone() for p in (*layer.parameters(), *inputs)]
    return gradients, counts, layer.gate.calls, layer.step_counts.tolist()


@pytest.mark.parametrize("runner", [through_contexts, through_captures])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tie_that_a_recomputation_would_break_otherwise_stays_broken(runner, ranks):
    kept = LocalWorld(ranks).run(lambda world: run_two_microbatches(world, None))

    again = LocalWorld(ranks).run(lambda world: run_two_microbatches(world, runner))

    for (gradients, *counted), (recomputed, counts, calls, seen) in zip(kept, again, strict=True):
        assert (counts, seen) == (counted[0], counted[2])
        assert calls == 2 * counted[1]
        for one, other in zip(gradients, recomputed, strict=True):
            # The weights are those of the recomputation's logits, an epsilon away.
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_recomputed_layer_has_the_same_bits():
    def run(world, runner):
        layer = build(world, router=False)
        hidden = random.normal(random.Key(2, "x"), (2, 5, 3), dtype=torch.float64).requires_grad_()
        output, report = layer(hidden) if runner is None else runner(layer, hidden)
        (output.square().sum() + report.balance + report.z).backward()
        return [output.detach(), hidden.grad, *(p.grad for p in layer.parameters())]

    kept = LocalWorld(2).run(lambda world: run(world, None))
    for runner in (through_contexts, through_captures):
        again = LocalWorld(2).run(lambda world, runner=runner: run(world, runner))
        for plain, other in zip(kept, again, strict=True):
            assert all(map(torch.equal, plain, other))


def test_a_recomputation_without_notes_is_refused():
    layer = build(LocalWorld(1).run(lambda world: world)[0])
    hidden = torch.ones(1, 2, 3, dtype=torch.float64, requires_grad=True)
    output, _ = checkpoint(layer, hidden, use_reentrant=False)

    with pytest.raises(ShardingError, match="context_fn=routing_contexts"):
        output.sum().backward()


@pytest.mark.parametrize("around", [through_contexts, through_captures])
@pytest.mark.parametrize("runner", [through_contexts, through_captures])
def test_regions_within_regions_keep_their_notes(runner, around):
    def run(world, nested):
        layers = [build(world) for _ in range(3)]

        def inner(hidden):
            for layer in layers[:2]:
                hidden = hidden + layer(hidden)[0]
            return hidden

        def outer(hidden):
            return layers[2](runner(inner, hidden) if nested else inner(hidden))[0]

        hidden = random.normal(random.Key(2, "x"), (1, 4, 3), dtype=torch.float64).requires_grad_()
        output = around(outer, hidden) if nested else outer(hidden)
        output.square().sum().backward()
        return [hidden.grad, *(p.grad for layer in layers for p in layer.parameters())]

    expected, found = (
        LocalWorld(2).run(lambda world, nested=nested: run(world, nested))
        for nested in (False, True)
    )

    for plain, again in zip(expected, found, strict=True):
        for one, other in zip(plain, again, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_notes_of_another_layer_are_refused():
    first, second = (build(LocalWorld(1).run(lambda world: world)[0]) for _ in range(2))
    order = iter([first, second])
    hidden = torch.ones(1, 2, 3, dtype=torch.float64, requires_grad=True)
    output, _ = through_contexts(lambda given: next(order)(given), hidden)

    with pytest.raises(ShardingError, match="at a point where the forward did not"):
        output.sum().backward()
