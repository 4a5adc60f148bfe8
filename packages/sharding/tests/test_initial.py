"""Initial values by place: the same in every layout, without the process's generator."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives import Box, LocalWorld, SingleCommunicator, random
from trainwright.sharding import (
    ColumnParallelLinear,
    ParameterPlacement,
    RowParallelLinear,
    ShardingError,
    VocabParallelEmbedding,
    draw_parameter_,
)

BUILDERS = {
    "column": lambda tp, dtype: ColumnParallelLinear(6, 12, tp, bias=True, dtype=dtype),
    "row": lambda tp, dtype: RowParallelLinear(12, 6, tp, bias=True, dtype=dtype),
    "embedding": lambda tp, dtype: VocabParallelEmbedding(12, 6, tp, dtype=dtype),
}
CUT = {"column": 0, "row": 1, "embedding": 0}


def drawn_weight(kind, size, dtype=torch.float32):
    def run(tp):
        layer = BUILDERS[kind](tp, dtype)
        layer.reset_parameters(random.Key(3, "layer.weight"), 0.5)
        return layer.weight.detach()

    return torch.cat(LocalWorld(size).run(run), CUT[kind])


@given(st.sampled_from(sorted(BUILDERS)), st.sampled_from([2, 3, 4]))
def test_every_layout_draws_the_same_weights(kind, size):
    assert torch.equal(drawn_weight(kind, size), drawn_weight(kind, 1))


def test_weights_have_the_deviation_asked_for_and_other_names_other_weights():
    place = ParameterPlacement.replicated((64, 64))
    first, second = torch.empty(64, 64), torch.empty(64, 64)

    draw_parameter_(first, place, random.Key(0, "a"), 0.02)
    draw_parameter_(second, place, random.Key(0, "b"), 0.02, mean=1.0)

    assert first.std().item() == pytest.approx(0.02, rel=0.05)
    assert first.mean().item() == pytest.approx(0.0, abs=2e-3)
    assert second.mean().item() == pytest.approx(1.0, abs=2e-3)
    assert not torch.equal(first, second - 1.0)


def test_runs_in_other_dtypes_start_from_the_same_weights_rounded_once():
    exact = drawn_weight("column", 2, torch.float64)

    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(drawn_weight("column", 3, dtype), exact.to(dtype))


def test_a_fused_parameter_is_drawn_box_by_box():
    whole = torch.empty(8, 3)
    fused = torch.empty(4, 3)
    boxes = (Box((1, 0), (3, 3)), Box((6, 0), (8, 3)))
    key = random.Key(7, "qkv")

    draw_parameter_(whole, ParameterPlacement.replicated((8, 3)), key, 1.0)
    draw_parameter_(fused, ParameterPlacement((8, 3), boxes), key, 1.0)

    assert torch.equal(fused, torch.cat([whole[1:3], whole[6:8]]))


def test_layers_start_at_zero_and_never_touch_the_generator_of_the_process():
    before = torch.get_rng_state()

    for kind, build in BUILDERS.items():
        layer = build(SingleCommunicator(), torch.float32)
        assert all(not parameter.any() for parameter in layer.parameters()), kind
        layer.reset_parameters(random.Key(1, kind), 1.0)

    assert torch.equal(torch.get_rng_state(), before)


def test_resetting_makes_the_bias_zero_again():
    for kind in ("column", "row"):
        layer = BUILDERS[kind](SingleCommunicator(), torch.float32)
        torch.nn.init.ones_(layer.bias)
        layer.reset_parameters(random.Key(1, kind), 1.0)
        assert not layer.bias.any()


def test_a_parameter_of_another_size_than_its_boxes_is_refused():
    with pytest.raises(ShardingError, match="w has 4 elements but its boxes hold 6"):
        draw_parameter_(
            torch.empty(4), ParameterPlacement.replicated((6,)), random.Key(0, "w"), 1.0
        )
