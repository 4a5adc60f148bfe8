"""Marked terms of a sum: only a reduction may use them, and it computes what it did unmarked."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator, differentiable
from trainwright.sharding import (
    Mesh,
    MeshShape,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    Transition,
    redistribute,
)
from trainwright.sharding.placement import (
    PartialTensor,
    apply_transition,
    mark_partial,
    terms_of,
)

ALONE = Mesh(SingleCommunicator(), MeshShape())


def marked(*axes: str) -> PartialTensor:
    weight = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    return mark_partial(weight * 2, *(axes or ("tp",)))


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda x: x + 1, "add"),
        (lambda x: 1 + x, "add"),
        (lambda x: x + x, "add"),
        (lambda x: torch.zeros(2, 3).add_(x), "add_"),
        (lambda x: x.sum(), "sum"),
        (lambda x: nn.LayerNorm(3)(x), "layer_norm"),
        (lambda x: F.linear(x, torch.zeros(1, 3)), "linear"),
        (lambda x: F.dropout(x, 0.0), "dropout"),
        (lambda x: torch.cat([torch.zeros(2, 3), x]), "cat"),
        (lambda x: torch.stack((x, x)), "stack"),
        (lambda x: x.detach(), "detach"),
        (lambda x: x.data, "data"),
        (lambda x: x.float(), "float"),
        (lambda x: x.to(torch.float64), "to"),
        (lambda x: x.view(6), "view"),
        (lambda x: x[0], "__getitem__"),
        (lambda x: list(x), "unbind|__iter__"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x.data_ptr(), "data_ptr"),
        (lambda x: x.backward(torch.ones(2, 3)), "backward"),
        (lambda x: x == x, "eq|__eq__"),
        (lambda x: bool(x), "__bool__"),
        (lambda x: copy.deepcopy(x), "__deepcopy__"),
        (lambda x: differentiable.all_reduce(x, TwoRanks()), "."),
        (lambda x: Doubled.apply(x), "mul"),
    ],
)
def test_a_partial_sum_that_is_used_is_an_error_that_says_what_used_it(
    use: Callable[[torch.Tensor], object], named: str
) -> None:
    message = rf"^({named}\S*) uses a tensor of shape \(2, 3\) that is partial over tp: .*Reduce"
    with pytest.raises(ShardingError, match=message):
        use(marked())


class TwoRanks(SingleCommunicator):
    """A communicator that has a peer, so that a reduction is not skipped."""

    size = 2


class Doubled(torch.autograd.Function):
    """An operation whose Python does not go through the tensor's own methods."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_what_describes_a_partial_sum_is_known() -> None:
    partial = marked("dp", "tp")

    assert (partial.shape, partial.dtype, partial.device.type) == ((2, 3), torch.float64, "cpu")
    assert (partial.ndim, partial.dim(), partial.numel(), partial.size(1)) == (2, 2, 6, 3)
    assert partial.requires_grad
    assert partial.stride() == (3, 1)
    assert partial.is_floating_point()
    assert not partial.is_leaf
    assert len(partial) == 2
    assert partial.axes == ("dp", "tp")
    assert str(partial) == f"{partial}" == "PartialTensor(shape=(2, 3), over=dp, tp)"


def test_terms_can_be_taken_and_gradients_pass_through_both_ways() -> None:
    weight = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    terms = terms_of(mark_partial(weight * 2, "tp"))
    (gradient,) = torch.autograd.grad(terms.square().sum(), weight, create_graph=True)
    gradient.sum().backward()

    assert type(terms) is torch.Tensor
    assert torch.equal(terms, weight * 2)
    assert torch.equal(gradient, weight * 8)
    assert torch.equal(weight.grad, torch.full_like(weight, 8))
    assert terms_of(weight) is weight


@pytest.mark.parametrize("target", [Replicate(), Shard(0), Shard(1)])
def test_a_marked_sum_is_reduced_as_an_unmarked_one_is(target: Replicate | Shard) -> None:
    def run(world: Communicator) -> None:
        mesh = Mesh(world, MeshShape(tp=2))
        weight = torch.arange(8.0, dtype=torch.float64).view(2, 4) * (world.rank + 1)
        found = []
        for mark in (lambda x: x, lambda x: mark_partial(x, "tp")):
            leaf = weight.clone().requires_grad_()
            part = redistribute(mark(leaf * 1), mesh, {"tp": Partial()}, {"tp": target})
            assert type(part) is torch.Tensor
            part.square().sum().backward()
            found.append((part.detach(), leaf.grad))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)

    LocalWorld(2).run(run)


def test_a_sum_over_two_axes_stays_partial_until_both_are_reduced() -> None:
    def run(world: Communicator) -> tuple[str, float]:
        mesh = Mesh(world, MeshShape(cp=2, tp=2))
        both = {"cp": Partial(), "tp": Partial()}
        terms = mark_partial(torch.tensor([float(10**world.rank)]), "cp", "tp")
        half = redistribute(terms, mesh, both, {"cp": Partial()})
        with pytest.raises(ShardingError, match=r"mul uses a tensor .* partial over cp:"):
            half * 2
        whole = redistribute(half, mesh, {"cp": Partial()}, {})
        return repr(half), float(whole)

    found = LocalWorld(4).run(run)

    assert found == [("PartialTensor(shape=(1,), over=cp)", 1111.0)] * 4


def test_a_reduction_that_forgets_an_axis_is_refused_before_anything_is_sent() -> None:
    partial = marked("tp")

    with pytest.raises(ShardingError, match=r"partial over tp, but its source there is Replicate"):
        redistribute(partial, ALONE, {"dp": Partial()}, {})
    shard = Transition("tp", Shard(0), Replicate())
    with pytest.raises(ShardingError, match=r"partial over tp, but its source there is Shard"):
        apply_transition(partial, shard, ALONE.communicator("tp"))
    with pytest.raises(ShardingError, match="needs the axes"):
        mark_partial(torch.zeros(1))


def test_a_sum_of_one_term_is_marked_too_and_a_transition_on_another_axis_keeps_the_mark() -> None:
    reduced = redistribute(marked("tp"), ALONE, {"tp": Partial()}, {})
    moved = redistribute(marked("tp"), ALONE, {"tp": Partial(), "dp": Shard(0)}, {"tp": Partial()})
    made = redistribute(marked("tp"), ALONE, {"tp": Partial()}, {"tp": Partial(), "dp": Partial()})

    assert type(reduced) is torch.Tensor
    assert torch.equal(reduced, torch.full((2, 3), 2.0, dtype=torch.float64))
    assert isinstance(moved, PartialTensor)
    assert moved.axes == ("tp",)
    assert isinstance(made, PartialTensor)
    assert made.axes == ("dp", "tp")
