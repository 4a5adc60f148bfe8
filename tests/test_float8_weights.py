"""Weights that travel as FP8 codes are those of one rank that quantises the whole weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import LocalWorld
from trainwright.precision.float8 import (
    Along,
    Current,
    Float8Codec,
    Float8State,
    Role,
    Scope,
    convert_linears,
)
from trainwright.precision.formats import E4M3, E5M2
from trainwright.sharding import Mesh, MeshShape, ShardingError, ShardPolicy, by_class
from trainwright.sharding.data import data_parallel, full_state_dict
from trainwright.sharding.data.testing import RecordingCommunicator
from trainwright.sharding.tensor import ColumnParallelLinear, Cut, RowParallelLinear
from trainwright.sharding.testing import check_weight_codec, load_plain_

SIZES = (24, 37, 10)
LINEARS = (nn.Linear, ColumnParallelLinear, RowParallelLinear)
CODEC = Float8Codec()


def make_plain(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(*SIZES[:2]), nn.Tanh(), nn.Linear(*SIZES[1:]), nn.LayerNorm(10))
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            # Each rank's part has a largest number of its own.
            parameter.copy_(
                values * torch.arange(1, 1 + len(values)).view(-1, *[1] * (values.ndim - 1))
            )
    return model.to(dtype)


def make_parallel(tp, cut, dtype):
    up = ColumnParallelLinear(*SIZES[:2], tp, cut=cut, bias=True, dtype=dtype)
    down = RowParallelLinear(*SIZES[1:], tp, cut=cut, bias=True, dtype=dtype)
    return nn.Sequential(up, nn.Tanh(), down, nn.LayerNorm(10, dtype=dtype))


def matrices(codec):
    return lambda name, parameter: codec if parameter.ndim == 2 else None


def quantized(weight, codec):
    """Return what one rank makes of a whole weight, by the recipe of the products."""
    recipe = Current(power_of_two=codec.power_of_two, forward=codec.format)
    bound = Float8State(recipe, {"whole": Scope()}).products["whole"]
    operand = bound.operand(weight, Role.WEIGHT, Along.COLUMNS, False)
    return operand.dequantize(weight.dtype)


def shard(model, mesh, codec=CODEC, **policy):
    chosen = {"stage": 3, "units": by_class(*LINEARS), "alignment": 1, **policy}
    return data_parallel(model, mesh, ShardPolicy(weight_codec=matrices(codec), **chosen))


@settings(max_examples=4)
@example(dp=2, sizes=(37, 0), codec=Float8Codec(E5M2, False), dtype=torch.float32)
@example(dp=3, sizes=(37,), codec=CODEC, dtype=torch.float64)
@given(
    dp=st.integers(2, 3),
    sizes=st.sampled_from([(37,), (20, 17), (0, 37)]),
    codec=st.builds(Float8Codec, st.sampled_from([E4M3, E5M2]), st.booleans()),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_gathered_weights_are_the_whole_weight_quantised(dp, sizes, codec, dtype):
    plain = make_plain(dtype)

    def run(world):
        mesh = Mesh(world, MeshShape(dp=dp, tp=len(sizes)))
        cut, tp = Cut.of_sizes(sizes), mesh.communicator("tp")
        model = make_parallel(tp, cut, dtype)
        load_plain_(model, plain.state_dict(), Mesh(tp, MeshShape(tp=tp.size)))
        parallel = shard(model, mesh, codec)
        for step in range(2):
            parallel.await_weights()
            found = {name: p.detach().clone() for name, p in model.named_parameters()}
            parallel.release()
            for name, weight in plain.named_parameters():
                expected = weight.detach() * 3**step
                if weight.ndim == 2:
                    expected = quantized(expected, codec)
                if name in ("0.weight", "0.bias"):
                    expected = cut.take(expected, 0, tp.rank)
                if name == "2.weight":
                    expected = cut.take(expected, 1, tp.rank)
                assert torch.equal(found[name], expected), name
            with torch.no_grad():
                for piece in parallel.pieces.values():
                    piece.parameter.mul_(3)
            parallel.publish()

    LocalWorld(dp * len(sizes)).run(run)


@given(
    codec=st.builds(Float8Codec, st.sampled_from([E4M3, E5M2]), st.booleans()),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    edges=st.lists(st.integers(0, 40), max_size=3).map(sorted),
    exponent=st.integers(-20, 10),
)
def test_codecs_treat_parts_as_the_whole(codec, dtype, edges, exponent):
    whole = torch.randn(40, generator=torch.Generator().manual_seed(exponent + 99))

    check_weight_codec(codec, (whole * 2.0**exponent).to(dtype), edges)


def train(world, coded, dtype=torch.float32):
    mesh = Mesh(world, MeshShape(dp=world.size))
    model = make_plain(dtype)
    convert_linears(model, Current(power_of_two=True), keep_ends=False)
    parallel = shard(model, mesh, CODEC if coded else None)
    optimizer = torch.optim.SGD([p.parameter for p in parallel.pieces.values()], lr=0.01)
    outputs = []
    for step in range(3):
        rows = torch.linspace(-1, 1, 6 * SIZES[0]).view(6, -1)[world.rank :: world.size] * (
            1 + step
        )
        parallel.zero_grad()
        parallel.last_backward()
        output = model(rows.to(dtype))
        outputs.append(output.detach())
        output.float().square().sum().backward()
        parallel.reduce()
        parallel.wait()
        optimizer.step()
        parallel.publish()
    return outputs, full_state_dict(parallel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_by_fp8_products_is_the_same_whatever_travels(dtype):
    as_they_are = LocalWorld(2).run(train, False, dtype)

    as_codes = LocalWorld(2).run(train, True, dtype)

    for (outputs, state), (others, other_state) in zip(as_they_are, as_codes, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(outputs, others, strict=True))
        assert state.keys() == other_state.keys()
        assert all(torch.equal(state[name], other_state[name]) for name in state)


def test_codes_move_half_of_the_bytes_of_16_bit_weights():
    def gathered(world, codec):
        calls = []
        mesh = Mesh(RecordingCommunicator(world, calls), MeshShape(dp=world.size))
        parallel = shard(make_plain(), mesh, codec, alignment=32)
        del calls[:]
        parallel.await_weights()
        parallel.release()
        moved = sum(c.numel * c.dtype.itemsize for c in calls if c.operation == "all_gather")
        del calls[:]
        parallel.publish()
        return moved, sum(c.numel * c.dtype.itemsize for c in calls)

    wide = LocalWorld(2).run(gathered, None)
    coded = LocalWorld(2).run(gathered, CODEC)

    weights = sum(p.numel() for p in make_plain().parameters() if p.ndim == 2)
    padding = 2 * 64
    for (bytes_wide, _), (bytes_coded, agreed) in zip(wide, coded, strict=True):
        assert abs(bytes_wide - bytes_coded - weights) <= padding
        assert agreed == 2 * 4  # one number a matrix, together


def test_loading_takes_what_was_changed_and_leaves_masters_exact():
    def run(world):
        model = make_plain()
        parallel = shard(model, Mesh(world, MeshShape(dp=world.size)))
        before = full_state_dict(parallel)
        parallel.await_weights()
        with torch.no_grad():
            model[2].weight[1] = 77.0
        parallel.load_masters()
        parallel.release()
        parallel.await_weights()
        return before, full_state_dict(parallel), model[2].weight.detach().clone()

    before, after, weight = LocalWorld(2).run(run)[0]

    assert torch.equal(after["2.weight"][1], torch.full((37,), 77.0))
    expected = before["2.weight"].clone()
    expected[1] = 77.0
    assert torch.equal(after["2.weight"], expected)
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(weight, quantized(expected.bfloat16(), CODEC))


def test_a_weight_that_is_not_finite_arrives_as_nan_everywhere():
    def run(world):
        model = make_plain()
        parallel = shard(model, Mesh(world, MeshShape(dp=world.size)))
        if world.rank == 1:
            with torch.no_grad():
                parallel.pieces["2.weight"].parameter[-1] = torch.inf
        parallel.publish()
        parallel.await_weights()
        return bool(model[2].weight.isnan().all()), bool(model[0].weight.isfinite().all())

    assert LocalWorld(2).run(run) == [(True, True)] * 2


def test_codes_need_weights_that_are_cut():
    with pytest.raises(ShardingError, match="weight_codec has no effect at stage 2"):
        ShardPolicy(stage=2, weight_codec=matrices(CODEC))
