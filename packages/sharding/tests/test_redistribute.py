"""Redistribution of activations: values, gradients and collectives of every transition."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld
from trainwright.sharding import (
    Mesh,
    MeshShape,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    Transition,
    plan_redistribution,
    redistribute,
)

AXES = ("dp", "tp")


def part_of(whole, placements, mesh, terms):
    """The definition: cut from the outer axis inwards; terms of a sum add up to the whole."""
    part = whole
    for axis in AXES:
        size, at = mesh.size(axis), mesh.coordinate(axis)
        placement = placements.get(axis, Replicate())
        if isinstance(placement, Shard):
            part = part.chunk(size, placement.dim)[at]
        if placement == Partial():
            part = part * terms[axis][at]
    return part.clone()


def terms_for(size):
    values = torch.arange(1.0, size + 1, dtype=torch.float64)
    values[-1] = 1 - values[:-1].sum()
    return values


def dual(placements, gradient):
    found = {axis: p for axis, p in placements.items() if p != Partial()}
    return {**found, **gradient}


def check(shape, cases):
    """Compare value and gradient of every case with the definition, in one world."""
    whole = torch.randn(12, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    upstream = torch.randn(12, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(world):
        mesh = Mesh(world, shape)
        terms = {axis: terms_for(mesh.size(axis)) for axis in AXES}
        for source, target, gradient in cases:
            part = part_of(whole, source, mesh, terms).requires_grad_()
            result = redistribute(part, mesh, source, target, gradient=gradient)
            total = result.detach().clone()
            summed = [axis for axis in AXES if target.get(axis) == Partial()]
            if summed:
                mesh.communicator(*summed).all_reduce(total).wait()
            kept = {axis: p for axis, p in target.items() if p != Partial()}
            result.backward(part_of(upstream, dual(target, gradient), mesh, terms))
            torch.testing.assert_close(total, part_of(whole, kept, mesh, terms))
            torch.testing.assert_close(part.grad, part_of(upstream, dual(source, {}), mesh, terms))

    LocalWorld(shape.world_size).run(run)


PLACEMENTS = [Replicate(), Shard(0), Shard(1), Partial()]


def all_cases(axes):
    for source, target in itertools.product(
        itertools.product(PLACEMENTS, repeat=len(axes)), repeat=2
    ):
        choices = [
            [{}, {axis: Partial()}] if p == Replicate() else [{}]
            for axis, p in zip(axes, target, strict=True)
        ]
        for gradients in itertools.product(*choices):
            gradient = {axis: p for chosen in gradients for axis, p in chosen.items()}
            yield (
                dict(zip(axes, source, strict=True)),
                dict(zip(axes, target, strict=True)),
                gradient,
            )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_transition_on_one_axis_keeps_value_and_gradient(size):
    check(MeshShape(tp=size), list(all_cases(("tp",))))


def test_every_plan_on_two_axes_keeps_value_and_gradient():
    check(MeshShape(dp=2, tp=2), list(all_cases(AXES)))


@given(
    st.lists(st.sampled_from(list(all_cases(AXES))), min_size=5, max_size=10),
    st.sampled_from([(3, 2), (2, 3), (1, 4)]),
)
@settings(max_examples=5)
def test_plans_on_meshes_of_other_sizes_keep_value_and_gradient(cases, sizes):
    check(MeshShape(dp=sizes[0], tp=sizes[1]), cases)


def test_all_plans_on_three_axes_cut_from_the_outer_axis_inwards_and_join_back():
    axes = ("dp", "cp", "tp")
    for source, target in itertools.product(itertools.product(PLACEMENTS, repeat=3), repeat=2):
        state = dict(zip(axes, source, strict=True))
        nesting = {p: [axis for axis in axes if state[axis] == p] for p in PLACEMENTS}
        for step in plan_redistribution(state.copy(), dict(zip(axes, target, strict=True))):
            assert state[step.axis] == step.source != step.target
            state[step.axis] = step.target
            if isinstance(step.source, Shard):
                assert nesting[step.source].pop() == step.axis
            if isinstance(step.target, Shard):
                assert all(axes.index(a) < axes.index(step.axis) for a in nesting[step.target])
                nesting[step.target].append(step.axis)
        assert tuple(state.values()) == target


def test_a_transition_names_its_collectives():
    replicate, shard, partial = Replicate(), Shard(0), Partial()
    named = {
        (replicate, shard): (None, "all_gather"),
        (replicate, partial): (None, None),
        (shard, replicate): ("all_gather", None),
        (shard, Shard(1)): ("all_to_all", "all_to_all"),
        (shard, partial): (None, None),
        (partial, replicate): ("all_reduce", None),
        (partial, shard): ("reduce_scatter", "all_gather"),
    }

    for (source, target), (forward, backward) in named.items():
        step = Transition("tp", source, target)
        assert (step.forward_collective, step.backward_collective) == (forward, backward)
    entering = Transition("tp", replicate, replicate, partial_gradient=True)
    assert (entering.forward_collective, entering.backward_collective) == (None, "all_reduce")
    gathering = Transition("tp", shard, replicate, partial_gradient=True)
    assert gathering.backward_collective == "reduce_scatter"


def test_nothing_is_planned_where_nothing_changes():
    placements = {"dp": Shard(0), "tp": Partial()}

    assert plan_redistribution(placements, placements) == ()
    assert plan_redistribution({}, {}, {"tp": Replicate()}) == ()


def test_an_inner_shard_is_joined_and_cut_again_when_the_outer_one_moves():
    plan = plan_redistribution({"dp": Shard(0), "tp": Shard(0)}, {"tp": Shard(0)})

    assert plan == (
        Transition("tp", Shard(0), Replicate()),
        Transition("dp", Shard(0), Replicate()),
        Transition("tp", Replicate(), Shard(0)),
    )


def test_a_shard_moves_between_dims_in_one_exchange():
    assert plan_redistribution({"tp": Shard(0)}, {"tp": Shard(1)}) == (
        Transition("tp", Shard(0), Shard(1)),
    )


def test_shared_key_gradients_are_summed_once_before_the_weight_gradient():
    # SHD-25: x=2, w=3, the ranks' query heads give dK of 1 and 4; dK is 5, dW 10 and dx 15.
    def run(world):
        mesh = Mesh(world, MeshShape(tp=2))
        x = torch.tensor(2.0, requires_grad=True)
        weight = torch.tensor(3.0, requires_grad=True)
        key = redistribute(x * weight, mesh, {}, {}, gradient={"tp": Partial()})
        (key * (1.0, 4.0)[mesh.coordinate("tp")]).backward()
        return weight.grad.item(), x.grad.item()

    assert LocalWorld(2).run(run) == [(10.0, 15.0)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"xp": Shard(0)}, {}), "unknown axis 'xp'"),
        (({}, {"tp": Shard(0)}, {"tp": Partial()}), "its gradient cannot be Partial"),
        (({}, {"tp": Partial()}, {"tp": Partial()}), "its gradient cannot be Partial"),
        (({}, {}, {"tp": Shard(0)}), "its gradient cannot be Shard"),
    ],
)
def test_impossible_gradients_are_refused(arguments, message):
    with pytest.raises(ShardingError, match=message):
        plan_redistribution(*arguments)


def test_a_dim_that_cannot_be_cut_is_refused_before_anything_is_sent():
    def run(world):
        mesh = Mesh(world, MeshShape(tp=2))
        with pytest.raises(ValueError, match="cannot be cut over"):
            redistribute(torch.zeros(3, 3), mesh, {"tp": Shard(0)}, {"tp": Shard(1)})
        with pytest.raises(ValueError, match="cannot be cut over"):
            redistribute(torch.zeros(3, 3), mesh, {"tp": Partial()}, {"tp": Shard(1)})

    LocalWorld(2).run(run)
