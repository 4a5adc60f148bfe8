"""The memory model's own laws: what must hold whatever a real rank allocates."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.sharding import MeshShape, ShardingError
from trainwright.sharding.memory import (
    KINDS,
    Away,
    BytesPerParameter,
    Chunk,
    ExpertSizes,
    InFlight,
    KeptBytes,
    LatentSizes,
    RankMemory,
    Sharing,
    Slice,
    Tokens,
    Traffic,
    TransformerShape,
    buckets_of,
    decoder_bytes,
    memory,
    memory_svg,
    memory_table,
    parameters_of,
    slices_of,
    zero_bytes,
)

DENSE = TransformerShape(vocabulary=256, width=64, layers=4, heads=8, kv_heads=8, mlp_width=192)
TIED = attrs.evolve(DENSE, tied=True, kv_heads=2, qk_norm=True)
SPARSE = attrs.evolve(DENSE, experts=ExpertSizes(8, 36, 2, shared_width=48), dense_layers=[0])
LATENT = attrs.evolve(DENSE, latent=LatentSizes(24, 8, 4, 8, queries=20))
SHAPES = {"dense": DENSE, "tied": TIED, "experts": SPARSE, "latent": LATENT}
MIXED = BytesPerParameter(weights=2, gradients=4, masters=4, states=8, per_piece=0)


def chunk_of(
    shape: TransformerShape,
    layout: MeshShape,
    rank: int,
    *,
    stage: int = 0,
    each: BytesPerParameter = MIXED,
    alignment: int = 1,
    away: Away | None = None,
) -> Chunk:
    """The only stage of a pipeline rank."""
    places = layout.places(rank)
    per = shape.layers // layout.pp
    stages = slices_of(range(n * per, (n + 1) * per) for n in range(layout.pp))
    part = stages[places["pp"]]
    held = parameters_of(shape, layout, [part], tp_rank=places["tp"])
    sharing = Sharing(stage, alignment=alignment, away=away)
    return Chunk(part, buckets_of(held, layout, rank, sharing, each))


LAYOUTS = ("dp=4", "dp=2,tp=2", "tp=4,pp=2", "dp=4,tp=2,pp=2", "cp=2,tp=3", "dp=4,dp_shard=2")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_parameter_is_updated_by_one_rank_of_those_that_cut_it(
    name: str, layout: str, stage: int
) -> None:
    mesh, shape = MeshShape.parse(layout), SHAPES[name]
    updated = held = 0
    for rank in range(mesh.world_size):
        places = mesh.places(rank)
        chunk = chunk_of(shape, mesh, rank, stage=stage, alignment=8)
        updated += sum(bucket.updated for bucket in chunk.buckets)
        if places["dp"] == places["cp"] == 0:
            own = parameters_of(shape, mesh, [chunk.part], tp_rank=places["tp"])
            dense = sum(one.numel for one in own if not one.is_expert)
            routed = sum(one.numel for one in own if one.is_expert)
            copies = mesh.dp * mesh.cp if stage == 0 else mesh.dp_replicate
            # Experts that ep does not cut are copied over all of dp.
            held += dense * copies + routed * (mesh.edp if stage == 0 else 1)

    assert updated == held


@given(
    layout=st.sampled_from(["dp=1", "dp=8", "dp=2,cp=4"]),
    stage=st.integers(0, 3),
    parameters=st.sampled_from([2, 4]),
)
def test_without_padding_states_are_those_of_the_zero_paper(
    layout: str, stage: int, parameters: int
) -> None:
    mesh = MeshShape.parse(layout)
    # Eight ranks divide every size; norms, which stay wide, count as everything else here.
    each = BytesPerParameter(4, 4, 0, 8, 0)
    chunk = chunk_of(attrs.evolve(DENSE, layers=parameters), mesh, 0, stage=stage, each=each)

    held = sum(b.weights + b.gradients + b.states for b in chunk.buckets)

    numel = sum(b.numel for b in chunk_of_whole(parameters).buckets)
    if stage == 0:
        assert held == zero_bytes(numel, 1, 0, gradients=4, states=10)
    else:
        ranks = mesh.dp * mesh.cp
        kinds = {1: 8 + 8 / ranks, 2: 4 + 12 / ranks, 3: 16 / ranks}
        assert held == numel * kinds[stage]


def chunk_of_whole(layers: int) -> Chunk:
    return chunk_of(attrs.evolve(DENSE, layers=layers), MeshShape(), 0)


def test_weights_that_stay_wide_are_their_own_masters() -> None:
    assert MIXED.total == 18
    assert MIXED.wide == BytesPerParameter(4, 4, 0, 8, 0)


def test_a_tied_table_is_held_at_both_ends_of_a_pipeline_and_once_without_one() -> None:
    mesh = MeshShape(pp=2)
    tables = [
        [one for one in parameters_of(TIED, mesh, [part]) if "embed" in one.name]
        for part in slices_of([range(2), range(2, 4)])
    ]
    both = parameters_of(TIED, mesh, slices_of([range(2), range(2, 4)]))

    assert [[one.is_at_both_ends for one in end] for end in tables] == [[True], [True]]
    assert [one.is_at_both_ends for one in both if "embed" in one.name] == [False]


def test_experts_are_cut_over_their_own_copies_and_the_rest_over_data() -> None:
    mesh = MeshShape(dp=4, tp=2, ep=4)
    chunk = chunk_of(SPARSE, mesh, 0, stage=1)

    ranks = {bucket.num_ranks for bucket in chunk.buckets}

    assert ranks == {mesh.dp, mesh.edp} == {4, 1}


KEPT = decoder_bytes(DENSE, MeshShape(), Tokens(2, 32))


def peak(
    count: int = 1,
    *,
    kept: KeptBytes = KEPT,
    layout: str = "dp=4",
    stage: int = 0,
    **traffic: Any,
) -> RankMemory:
    chunk = chunk_of(DENSE, MeshShape.parse(layout), 0, stage=stage)
    return memory(DENSE, [chunk], count, kept, Traffic(**traffic))


def test_each_microbatch_in_flight_adds_what_it_keeps() -> None:
    more = peak(3).allocated - peak(2).allocated

    assert more == DENSE.layers * KEPT.dense.kept + KEPT.head + KEPT.logits


def test_recomputed_blocks_keep_their_inputs_and_one_of_them_everything() -> None:
    again = attrs.evolve(KEPT, segment=1, logits=0, loss=0, head_backward=0, norm_backward=0)
    held = peak(5, kept=again)

    inputs = 5 * (DENSE.layers * KEPT.stream + KEPT.head)
    assert held.activations == inputs - KEPT.head + KEPT.dense.kept
    assert held.moment == "block 3"


@pytest.mark.parametrize("count", [1, 2, 4])
def test_later_stages_hold_less(count: int) -> None:
    held = [peak(count, stage=stage, reduce_each_backward=True).total for stage in range(4)]

    assert held == sorted(held, reverse=True)


def test_gradients_that_wait_for_their_reduction_are_whole_at_every_stage() -> None:
    reduced = peak(2, stage=2, reduce_each_backward=True)
    waiting = peak(2, stage=2)

    assert reduced.gradients == waiting.gradients
    assert reduced.reduce < waiting.reduce
    assert waiting.gradients * 4 == waiting.reduce


def test_at_stage_three_units_are_whole_beside_what_is_kept() -> None:
    two, every = peak(stage=3), peak(stage=3, live_units=None)

    chunk = chunk_of(DENSE, MeshShape(dp=4), 0, stage=3)
    whole = sum(bucket.whole_weights for bucket in chunk.buckets)
    assert every.gathered == whole == 4 * every.weights
    assert 0 < two.gathered < every.gathered


def test_the_reserve_is_a_share_of_everything_else() -> None:
    held = peak(2, reserve=0.25)

    assert held.reserve == held.allocated // 4
    assert held.total == held.allocated + held.reserve


def test_without_microbatches_a_rank_holds_its_model_states() -> None:
    chunk = chunk_of(DENSE, MeshShape(dp=4), 0)
    held = memory(DENSE, [chunk], [], KEPT, buffer_bytes=100)

    assert held.total == held.model_states
    assert held.weights == sum(b.weights for b in chunk.buckets) + 100


def test_deferred_weight_gradients_keep_products_inputs_and_output_gradients() -> None:
    chunk = chunk_of(DENSE, MeshShape(), 0)
    usual = memory(DENSE, [chunk], [InFlight((1,))], KEPT)
    waits = memory(DENSE, [chunk], [InFlight((1,), waiting=(2,), splits=True)], KEPT)

    stage = DENSE.layers * KEPT.dense.deferred + KEPT.head_deferred
    assert waits.allocated - usual.allocated >= 2 * stage


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("recompute", [0, 1, 2])
def test_more_tensor_ranks_and_cut_positions_hold_less(name: str, recompute: int) -> None:
    shape = SHAPES[name]

    def kept(tp: int, cut: bool) -> int:
        layout = MeshShape(dp=4 // tp, tp=tp)
        tokens = Tokens(2, 32, sequence_parallel=cut, segment=recompute)
        found = decoder_bytes(shape, layout, tokens)
        return found.dense.kept + (found.sparse.kept if found.sparse else 0)

    assert kept(1, False) > kept(2, False) > kept(2, True) > kept(4, True)


def test_norms_of_one_kernel_keep_one_stream_less() -> None:
    fused, composite = (
        decoder_bytes(DENSE, MeshShape(), Tokens(2, 32, compute=4, fused_norms=way)).dense.kept
        for way in (True, False)
    )

    assert composite - fused == 2 * 4 * 2 * 32 * DENSE.width


def test_a_llama_layer_keeps_what_the_closed_form_says() -> None:
    s, b, h, f, a, g = 128, 2, 64, 192, 8, 2
    shape = attrs.evolve(DENSE, kv_heads=g)
    kept = decoder_bytes(shape, MeshShape(), Tokens(b, s)).dense.kept

    # s b h (12 + 4 g/a + 8 f/h) + 4 a s b, where 12 are two norms' inputs and outputs, queries and
    # attention's output. In at least float32 the norms' inputs take twice as much; one number a
    # row is a norm's.
    closed = s * b * h * (12 + 4 * g / a + 8 * f / h) + 4 * a * s * b
    assert kept == closed + 2 * s * b * (2 * h + 4)


MEMORY = RankMemory(3 * 2**20, 2**20, 0, activations=5 * 2**19, moment="block 1")


def test_the_table_has_a_line_a_rank_and_a_column_a_kind_that_is_used() -> None:
    table = memory_table({"first": MEMORY, "last": attrs.evolve(MEMORY, logits=2**18)})

    lines = [line.split() for line in table.splitlines()]
    assert lines[0] == [
        *["in", "MiB", "weights", "gradients", "activations", "logits", "total"],
        *["most", "during"],
    ]
    assert lines[1] == ["first", "3.00", "1.00", "2.50", "0.00", "6.50", "block", "1"]
    assert lines[2][-3] == "6.75"
    assert "6815744" in memory_table({"first": MEMORY}, unit="B")


def test_the_table_says_what_is_not_on_the_device_behind_the_total() -> None:
    table = memory_table({"first": attrs.evolve(MEMORY, host=2**20), "last": MEMORY})

    lines = [line.split() for line in table.splitlines()]
    assert lines[0][-5:] == ["total", "in", "host", "most", "during"]
    assert [line[-4:-2] for line in lines[1:]] == [["6.50", "1.00"], ["6.50", "0.00"]]


def test_the_picture_has_a_bar_a_kind_whose_widths_are_the_bytes() -> None:
    picture = memory_svg({"a & b": MEMORY}, limit_bytes=10 * 2**20, title="<model>")

    root = ET.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    bars = {
        title.text: float(rect.get("width", "0"))
        for rect in root.iter(f"{space}rect")
        for title in rect.iter(f"{space}title")
    }
    assert list(bars) == [
        "a & b, weights: 3,145,728 bytes",
        "a & b, gradients: 1,048,576 bytes",
        "a & b, activations: 2,621,440 bytes",
    ]
    widths = list(bars.values())
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.02)
    assert sum(widths) == pytest.approx(640 * 6.5 / 10, abs=0.05)
    assert any(line.get("stroke-dasharray") for line in root.iter(f"{space}line"))


@pytest.mark.parametrize("stage", range(4))
def test_states_that_are_away_take_on_the_host_what_they_take_on_the_device(stage: int) -> None:
    here, away, in_file = (away_at(stage, away) for away in (None, Away(), Away(in_file=True)))
    # Below stage 2 the device keeps whole gradients, and the host this rank's part of their sums.
    sums = here.gradients // (4 if stage == 1 else 1)

    assert (away.states, away.weights) == (0, here.weights)
    assert away.gradients == (here.gradients if stage < 2 else 0)
    assert away.host == here.states + sums + wide_masters(stage)
    assert in_file.file == away.host - COUNTED.per_piece * pieces(stage)
    assert in_file.total == away.total


def test_weights_that_are_away_leave_nothing_on_the_device_between_uses() -> None:
    here, away = away_at(3, None), away_at(3, Away(weights=True))

    assert away.model_states == 0
    assert away.host == here.model_states + wide_masters(3)


@pytest.mark.parametrize("layers", [4, 40])
def test_three_units_of_a_file_are_in_memory_however_many_there_are(layers: int) -> None:
    shape = attrs.evolve(DENSE, layers=layers, vocabulary=8)
    chunk = chunk_of(shape, MeshShape(dp=2), 0, stage=3, away=Away(weights=True, in_file=True))
    largest = max(bucket.elsewhere.kept for bucket in chunk.buckets)

    held = memory(shape, [chunk], [], KEPT)

    assert held.host == 3 * largest
    assert held.file == sum(bucket.elsewhere.kept for bucket in chunk.buckets)


COUNTED = attrs.evolve(MIXED, per_piece=4)


def away_chunk(stage: int, away: Away | None) -> Chunk:
    return chunk_of(DENSE, MeshShape(dp=4), 0, stage=stage, each=COUNTED, away=away)


def away_at(stage: int, away: Away | None) -> RankMemory:
    return memory(DENSE, [away_chunk(stage, away)], [], KEPT)


def pieces(stage: int) -> int:
    return sum(bucket.pieces for bucket in away_chunk(stage, None).buckets)


def wide_masters(stage: int) -> int:
    """Bytes of masters that are the weights themselves on the device, and a copy on the host."""
    buckets = away_chunk(stage, None).buckets
    return sum(b.part * b.each.weights for b in buckets if not b.each.masters)


def test_kinds_are_all_of_a_ranks_memory() -> None:
    held = RankMemory(*range(1, 10))

    assert tuple(held.by_kind) == KINDS
    assert held.total == sum(range(1, 10))


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: Sharing(4),
        lambda: Sharing(2, away=Away(weights=True)),
        lambda: Sharing(alignment=0),
        lambda: BytesPerParameter(weights=3),
        lambda: BytesPerParameter(states=-1),
        lambda: Tokens(0, 8),
        lambda: Tokens(1, 8, compute=1),
        lambda: Tokens(1, 8, keeps_products=True),
        lambda: Traffic(reserve=1.0),
        lambda: LatentSizes(0, 1, 2, 3),
        lambda: memory(DENSE, [], 1, KEPT),
        lambda: memory(DENSE, [chunk_of(DENSE, MeshShape(), 0)], [InFlight((1, 2))], KEPT),
        lambda: parameters_of(SPARSE, MeshShape(dp=3, ep=3), [Slice(range(4), True, True)]),
        lambda: memory_table({}),
        lambda: memory_table({"a": MEMORY}, unit="GB"),
        lambda: memory_svg({"a": RankMemory(0, 0, 0)}),
    ],
)
def test_what_makes_no_sense_is_refused(mistake: Callable[[], object]) -> None:
    with pytest.raises(ShardingError):
        mistake()
