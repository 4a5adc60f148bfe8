"""Every form of a model's state carries the plain model's names and values, whatever is cut."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, ShardSpec
from trainwright.sharding import (
    ColumnParallelLinear,
    DataParallel,
    Mesh,
    MeshShape,
    RowParallelLinear,
    ShardPolicy,
    by_class,
    by_name,
    data_parallel,
)
from trainwright.sharding.data.loading import load_full
from trainwright.sharding.data.state_dict import full_state_dict, piece_state_dict
from trainwright.sharding.data.testing import (
    Network,
    NetworkPlan,
    network_plans,
)
from trainwright.sharding.testing import load_plain_, mesh_shapes

State = Mapping[str, torch.Tensor]


class Buffered(Network):
    """A network with buffers, one of which is not part of its state."""

    def __init__(self, plan: NetworkPlan, seed: int = 0) -> None:
        super().__init__(plan, seed)
        self.register_buffer("mean", torch.linspace(0, 1 + seed, 3))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.layers.register_buffer("seen", torch.tensor([True, seed > 0]))


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_equal_states(found: State, expected: State) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def move_masters(parallel: DataParallel) -> None:
    """Change every trained element, as an optimizer would."""
    with torch.no_grad():
        for piece in parallel.pieces.values():
            piece.parameter.mul_(-1.5).add_(0.25)
    parallel.publish()


def moved(module: nn.Module, policy: ShardPolicy) -> dict[str, torch.Tensor]:
    """Return the state of a plain model whose masters moved, in the weights' dtypes."""
    state = state_of(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = parameter.detach()
        if parameter.requires_grad:
            value = value.to(torch.promote_types(value.dtype, torch.float32)).mul(-1.5).add(0.25)
        choose = policy.parameter_dtype
        state[name] = value.to(choose(name, parameter) if choose else parameter.dtype)
    return state


def in_bfloat16(name: str, parameter: nn.Parameter) -> torch.dtype:
    return torch.bfloat16


policies = st.builds(
    ShardPolicy,
    stage=st.sampled_from([0, 1, 2, 3]),
    bucket_bytes=st.sampled_from([1, 200, 10**6]),
    alignment=st.integers(1, 3),
    units=st.sampled_from([None, by_class(nn.Linear), by_name("layers.*")]),
    parameter_dtype=st.sampled_from([None, in_bfloat16]),
)
meshes = mesh_shapes(8, ("dp", "cp", "tp")) | mesh_shapes(8, ("dp", "tp"), hybrid=True)
plans = network_plans([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=8)
@given(plan=plans, shape=meshes, policy=policies, data=st.data())
def test_a_full_state_is_the_plain_models_on_one_rank_and_empty_elsewhere(
    plan: NetworkPlan, shape: MeshShape, policy: ShardPolicy, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, shape.world_size - 1))
    block_bytes = data.draw(st.sampled_from([1, 24, 10**6]))
    plain = Buffered(plan)

    def run(world: Communicator) -> dict[str, torch.Tensor]:
        parallel = data_parallel(Buffered(plan), Mesh(world, shape), policy, hooks=False)
        move_masters(parallel)
        return full_state_dict(parallel, root=root, block_bytes=block_bytes)

    results = LocalWorld(shape.world_size).run(run)

    assert_equal_states(results[root], moved(plain, policy))
    assert all(not found for rank, found in enumerate(results) if rank != root)
    if plan.tied and plan.depth > 1:
        last = f"layers.{plan.depth - 1}.weight"
        assert results[root][last] is results[root]["layers.0.weight"]


@settings(max_examples=8)
@given(plan=plans, shape=meshes, policy=policies)
def test_pieces_tile_the_plain_models_state(
    plan: NetworkPlan, shape: MeshShape, policy: ShardPolicy
) -> None:
    plain = Buffered(plan)

    def run(world: Communicator) -> dict[str, tuple[torch.Tensor, ShardSpec, bool]]:
        mesh = Mesh(world, shape)
        parallel = data_parallel(Buffered(plan), mesh, policy, hooks=False)
        return {
            name: (tensor.clone(), spec, all(mesh.coordinate(a) == 0 for a in spec.replicated))
            for name, (tensor, spec) in piece_state_dict(parallel).items()
        }

    results = LocalWorld(shape.world_size).run(run)

    named = plain.state_dict(keep_vars=True)
    first_names = {id(tensor): name for name, tensor in reversed(named.items())}
    for name in first_names.values():
        expected = plain.state_dict()[name]
        times = torch.zeros(expected.shape)
        for held in results:
            if name in held:
                tensor, spec, counts = held[name]
                here = spec.extract(expected).reshape(-1).to(tensor.dtype)
                assert torch.equal(tensor.reshape(-1), here)
                if counts:
                    spec.insert(torch.ones(spec.numel), times)
        assert bool((times == 1).all()), name


@settings(max_examples=8)
@given(plan=plans, shape=meshes, policy=policies, data=st.data())
def test_a_plain_state_is_loaded_from_one_rank_or_from_all(
    plan: NetworkPlan, shape: MeshShape, policy: ShardPolicy, data: st.DataObject
) -> None:
    root = data.draw(st.none() | st.integers(0, shape.world_size - 1))
    block_bytes = data.draw(st.sampled_from([1, 24, 10**6]))
    state = state_of(Buffered(plan, seed=1))

    def run(world: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        parallel = data_parallel(Buffered(plan), Mesh(world, shape), policy, hooks=False)
        mine = state if root in (None, world.rank) else None
        load_full(parallel, mine, root=root, block_bytes=block_bytes)
        parallel.await_weights()
        return state_of(parallel.module), full_state_dict(parallel)

    results = LocalWorld(shape.world_size).run(run)

    expected = {name: tensor.to(results[0][0][name].dtype) for name, tensor in state.items()}
    for weights, _ in results:
        assert_equal_states(weights, expected)
    assert_equal_states(results[0][1], expected)


class Layers(nn.Module):
    """Tensor-parallel layers between replicated ones, with the plain model's names."""

    def __init__(self, tp: Communicator | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        if tp is None:
            self.up = nn.Linear(4, 6)
            self.down = nn.Linear(6, 5)
        else:
            self.up = ColumnParallelLinear(4, 6, tp, bias=True)
            self.down = RowParallelLinear(6, 5, tp, bias=True)


def plain_layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Layers()


@settings(max_examples=8)
@given(
    shape=st.sampled_from(
        [
            MeshShape.parse(text)
            for text in ("dp=2,tp=2", "dp=3,tp=2", "tp=3", "dp=4,tp=2,dp_shard=2")
        ]
    ),
    policy=policies,
    root=st.sampled_from([None, 0, 1]),
)
def test_tensor_parallel_parameters_come_and_go_whole(
    shape: MeshShape, policy: ShardPolicy, root: int | None
) -> None:
    before, after = state_of(plain_layers(0)), state_of(plain_layers(1))

    def run(world: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        mesh = Mesh(world, shape)
        model = Layers(mesh.communicator("tp"))
        load_plain_(model, before, mesh)
        parallel = data_parallel(model, mesh, policy, hooks=False)
        first = full_state_dict(parallel)
        load_full(parallel, after, root=root, block_bytes=20)
        return first, full_state_dict(parallel, block_bytes=20)

    first, second = LocalWorld(shape.world_size).run(run)[0]

    dtype = in_bfloat16 if policy.parameter_dtype else lambda name, tensor: tensor.dtype
    assert_equal_states(first, {name: t.to(dtype(name, t)) for name, t in before.items()})
    assert_equal_states(second, {name: t.to(dtype(name, t)) for name, t in after.items()})
