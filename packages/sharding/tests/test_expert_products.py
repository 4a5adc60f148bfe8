"""Products of blocks of rows with a matrix each, in one kernel, in many, and taken apart."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from trainwright.collectives import LocalWorld, random
from trainwright.sharding import Mesh, MeshShape, data_parallel, full_state_dict, load_full
from trainwright.sharding.expert import MixtureOfExperts, Routing, products
from trainwright.sharding.expert.products import multiply_experts
from trainwright.sharding.expert.testing import sum_gradients

SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=5)


def draw(name, *shape, dtype=torch.float64):
    return random.normal(random.Key(0, name), shape, dtype=dtype).requires_grad_()


def one_by_one(rows, weights, sizes):
    blocks = enumerate(rows.split(sizes))
    parts = [part @ weights[index % len(weights)].T for index, part in blocks]
    return torch.cat(parts)


@settings(max_examples=15)
@given(SIZES, st.sampled_from(["blocks", "grouped"]), st.integers(1, 2))
def test_each_block_is_multiplied_with_its_own_matrix(sizes, kind, rounds):
    num_experts, sizes = len(sizes), sizes * (1 if kind == "grouped" else rounds)
    dtype = torch.float32 if kind == "grouped" else torch.float64
    rows, weights = (
        draw("x", sum(sizes), 8, dtype=dtype),
        draw("w", num_experts, 16, 8, dtype=dtype),
    )
    upstream = draw("g", sum(sizes), 16, dtype=dtype).detach()
    exact = [tensor.detach().double().requires_grad_() for tensor in (rows, weights)]
    one_by_one(*exact, sizes).backward(upstream.double())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "has_grouped_products", lambda *_: kind == "grouped")
        output = multiply_experts(rows, weights, sizes)
        output.backward(upstream)

    for found, expected in zip((rows.grad, weights.grad), exact, strict=True):
        torch.testing.assert_close(found.double(), expected.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.double(), one_by_one(*exact, sizes), rtol=1e-5, atol=1e-5)


def test_gradients_of_gradients_are_those_of_single_products():
    rows, weights = draw("x", 5, 3), draw("w", 3, 2, 3)
    assert torch.autograd.gradgradcheck(
        lambda x, w: multiply_experts(x, w, (2, 0, 1, 0, 0, 2)), (rows, weights)
    )


@pytest.mark.parametrize("layout", ["dp=2,ep=2", "tp=2,ep=2,etp=1", "tp=2"])
def test_second_derivatives_of_a_layer_are_those_of_one_process(layout):
    def run(world, layout):
        mesh = Mesh(world, MeshShape.parse(layout))
        layer = MixtureOfExperts(3, 2, Routing(4, 2, normalize=False), mesh, dtype=torch.float64)
        layer.reset_parameters(random.Key(0, "layer"), 1.0)
        rows = slice(mesh.coordinate("dp"), None, mesh.size("dp"))
        own = draw("x", 2, 3, 3)[rows].detach().requires_grad_()
        output, report = layer(own)
        loss = output.square().sum() + report.balance + report.z
        (slope,) = torch.autograd.grad(loss, own, create_graph=True)
        slope.square().sum().backward()
        return rows, own.grad, sum_gradients(layer, mesh)

    ((_, of_input, gradients),) = LocalWorld(1).run(lambda world: run(world, "dp=1"))

    for rows, own, found in LocalWorld(2).run(lambda world: run(world, layout)):
        torch.testing.assert_close(own, of_input[rows], rtol=1e-11, atol=1e-11)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-11, msg=name)


def test_layers_over_one_mesh_share_the_memory_of_rows_on_their_way():
    def run(world):
        mesh = Mesh(world, MeshShape(dp=2, ep=2))
        layers = [MixtureOfExperts(4, 4, Routing(4, 2), mesh) for _ in range(2)]
        for layer in layers:
            layer(torch.ones(1, 3, 4))
        scratch = layers[0].ranks.scratch
        first = scratch.take(5, torch.ones(1, 4))
        assert scratch.take(2, torch.ones(1, 4)).data_ptr() == first.data_ptr()
        return scratch is layers[1].ranks.scratch is not mesh.submesh("dp").shared("other", list)

    assert LocalWorld(2).run(run) == [True, True]


def test_a_schedule_may_take_the_backward_apart_when_the_weights_are_gone():
    calls = []

    class Context:
        needs_input_grad = (True, True, False)

        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    class Halves(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            operation = getattr(func, "__self__", None)
            if not hasattr(operation, "weight_gradient"):
                return func(*args, **(kwargs or {}))
            calls.append((operation, Context(), args))
            with torch.no_grad():
                return operation.forward(calls[0][1], *args)

    rows, weights, upstream = draw("x", 5, 3), draw("w", 3, 2, 3), draw("g", 5, 2).detach()
    multiply_experts(rows, weights, (2, 0, 3)).backward(upstream)

    given = weights.detach().clone().requires_grad_()
    with Halves():
        multiply_experts(rows, given, (2, 0, 3))
    ((operation, context, args),) = calls
    with torch.no_grad():
        of_rows = operation.input_gradient(context, upstream)[0]
        given.untyped_storage().resize_(0)
        (of_weights,) = operation.weight_gradient(context, upstream)

    assert operation.weights == (1,)
    assert args[1] is given
    assert torch.equal(of_rows, rows.grad)
    assert torch.equal(of_weights, weights.grad)


def test_a_state_saved_in_one_layout_loads_in_another_with_the_biases():
    rule = Routing(4, 2, biased=True, score="sigmoid")

    def build(world, layout, seed):
        mesh = Mesh(world, MeshShape.parse(layout))
        layer = MixtureOfExperts(4, 4, rule, mesh, shared_width=3)
        layer.reset_parameters(random.Key(seed, "layer"), 1.0)
        layer.gate.e_score_correction_bias.fill_(float(seed))
        return data_parallel(layer, mesh)

    def save(world, layout):
        return full_state_dict(build(world, layout, 5))

    def load(world, layout, state):
        parallel = build(world, layout, 6)
        load_full(parallel, state if world.rank == 0 else None)
        return full_state_dict(parallel)

    state = LocalWorld(4).run(lambda world: save(world, "dp=2,tp=2,ep=2"))[0]
    found = LocalWorld(4).run(lambda world: load(world, "tp=4,ep=4,etp=1", state))[0]

    assert found.keys() == state.keys() >= {"gate.e_score_correction_bias"}
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
