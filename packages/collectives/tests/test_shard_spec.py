import itertools
import json
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainwright.collectives.errors import UsageError
from trainwright.collectives.shard_spec import Box, ShardSpec
from trainwright.collectives.testing.values import boxes, shapes, shard_partitions

# The columns of a 2 x 4 tensor, the right ones first.
HALVES = [Box((0, 2), (2, 4)), Box((0, 0), (2, 2))]


def labels(shape):
    """A tensor in which every element's value is its own global position."""
    return torch.arange(math.prod(shape)).reshape(shape)


def reshard(have, want, held):
    """Build the local data of each spec of ``want`` from that of ``have`` by their overlaps."""
    built = []
    for spec in want:
        local = torch.full((spec.numel,), -1)
        for source, data in zip(have, held, strict=True):
            for at_source, at_local in ShardSpec.overlap(source, spec):
                local[at_local] = data.reshape(-1)[at_source]
        built.append(local.reshape(spec.local_shape))
    return built


def gather(specs, held, shape):
    whole = torch.full(shape, -1)
    for spec, local in zip(specs, held, strict=True):
        spec.insert(local, whole)
    return whole


@st.composite
def two_partitions(draw):
    shape = draw(shapes())
    return shape, draw(shard_partitions(shape)), draw(shard_partitions(shape))


@st.composite
def spec_of_tensor(draw):
    shape = draw(shapes())
    return shape, draw(st.sampled_from(draw(shard_partitions(shape))))


def column(shape, tp, rank):
    width = shape[1] // tp
    return Box((0, rank * width), (shape[0], (rank + 1) * width))


# ---------------------------------------------------------------- what a spec holds


@given(spec_of_tensor())
def test_local_data_is_the_kept_range_of_the_boxes_flattened_one_after_the_other(drawn):
    shape, spec = drawn
    whole = labels(shape)

    local = spec.extract(whole)

    flat = [whole[box.slices].reshape(-1) for box in spec.boxes]
    expected = torch.cat([torch.empty(0, dtype=torch.int64), *flat])[spec.start : spec.stop]
    assert local.shape == spec.local_shape
    assert torch.equal(local.reshape(-1), expected)


@given(spec_of_tensor())
def test_parts_cover_the_local_data_in_order(drawn):
    shape, spec = drawn
    whole = labels(shape)

    parts = spec.parts()

    ends = [at + box.numel for at, box in parts]
    assert [at for at, _ in parts] == [0, *ends][: len(parts)]
    assert ends[-1:] == ([spec.numel] if spec.numel else [])
    flat = [whole[box.slices].reshape(-1) for _, box in parts]
    assert all(box.numel > 0 for _, box in parts)
    assert torch.cat(flat or [labels((0,))]).tolist() == spec.extract(whole).reshape(-1).tolist()


@given(st.data())
def test_a_range_of_a_box_is_at_most_two_boxes_less_one_a_dim(data):
    shape = data.draw(shapes(max_dims=4, max_size=4))
    box = data.draw(boxes(shape))
    start = data.draw(st.integers(0, box.numel))
    stop = data.draw(st.integers(start, box.numel))

    parts = list(box.cut(start, stop))

    whole = labels(shape)
    found = [element for part in parts for element in whole[part.slices].reshape(-1).tolist()]
    assert found == whole[box.slices].reshape(-1)[start:stop].tolist()
    assert len(parts) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_narrowing_a_spec_narrows_its_local_data(data):
    shape, spec = data.draw(spec_of_tensor())
    start = data.draw(st.integers(0, spec.numel))
    stop = data.draw(st.integers(start, spec.numel))

    narrow = spec.narrow(start, stop)

    whole = labels(shape)
    flat = spec.extract(whole).reshape(-1)
    assert narrow.extract(whole).reshape(-1).tolist() == flat[start:stop].tolist()
    assert narrow.numel == stop - start


def test_a_range_of_a_range_counts_from_the_first_ones_start():
    spec = ShardSpec.of_boxes("w", (2, 4), HALVES).narrow(1, 7).narrow(2, 5)

    assert (spec.start, spec.stop) == (3, 6)
    assert spec.extract(labels((2, 4))).tolist() == [7, 0, 1]


def test_boxes_are_concatenated_along_the_first_dim_only_where_the_rest_agrees():
    tall = ShardSpec.of_boxes("w", (6, 4), [Box((0, 0), (1, 2)), Box((2, 2), (5, 4))])
    mixed = ShardSpec.of_boxes("w", (6, 4), [Box((0, 0), (1, 2)), Box((2, 0), (5, 4))])
    none = ShardSpec.of_boxes("w", (6, 4), [])

    assert tall.local_shape == (4, 2)
    assert mixed.local_shape == (14,)
    assert none.local_shape == (0,)
    assert tall.narrow(1, 8).local_shape == (7,)


def test_the_spec_of_a_scalar_holds_one_element_or_none():
    value = torch.tensor(3.5)
    full = ShardSpec.full("scale", ())
    empty = full.narrow(1, 1)

    into = torch.tensor(0.0)
    full.insert(full.extract(value), into)

    assert full.local_shape == ()
    assert into.item() == 3.5
    assert empty.extract(value).shape == (0,)
    assert full.overlap(full) == [(slice(0, 1), slice(0, 1))]
    assert full.overlap(empty) == []


def test_extract_copies_and_insert_writes_strided_and_trained_tensors():
    whole = torch.arange(12.0).reshape(3, 4)
    spec = ShardSpec.of_boxes("w", (3, 4), [column((3, 4), 2, 1)])
    parameter = torch.nn.Parameter(whole.T.contiguous())

    local = spec.extract(parameter.T)
    before = local.clone()
    spec.insert(torch.zeros(3, 2), parameter.T)

    assert not local.requires_grad
    assert torch.equal(local, before)
    assert torch.equal(parameter.T[:, 2:], torch.zeros(3, 2))
    assert torch.equal(parameter.T[:, :2], whole[:, :2])


# ---------------------------------------------------------------- moving between cuts


@given(two_partitions())
@example(((), [ShardSpec.full("weight", ())], [ShardSpec.full("weight", ()).narrow(0, 1)]))
def test_any_cut_of_a_tensor_is_rebuilt_exactly_from_any_other(drawn):
    shape, have, want = drawn
    whole = labels(shape)
    held = [spec.extract(whole) for spec in have]

    built = reshard(have, want, held)

    assert all(
        torch.equal(local, spec.extract(whole)) for local, spec in zip(built, want, strict=True)
    )
    assert torch.equal(gather(want, built, shape), whole)


@given(two_partitions())
@example(
    ((2, 4), [ShardSpec.full("weight", (2, 4))], [ShardSpec.of_boxes("weight", (2, 4), HALVES)])
)
def test_runs_of_an_overlap_are_as_long_as_both_orders_allow(drawn):
    shape, have, want = drawn
    whole = labels(shape)

    for a in have:
        for b in want:
            runs = a.overlap(b)
            flat_a, flat_b = (spec.extract(whole).reshape(-1) for spec in (a, b))
            shared = [element for element in flat_a.tolist() if element in flat_b.tolist()]
            found = [element for at_a, _ in runs for element in flat_a[at_a].tolist()]
            assert found == shared
            assert all(torch.equal(flat_a[at_a], flat_b[at_b]) for at_a, at_b in runs)
            assert not any(
                first[0].stop == second[0].start and first[1].stop == second[1].start
                for first, second in itertools.pairwise(runs)
            )


@given(spec_of_tensor())
def test_the_overlap_of_a_spec_with_itself_is_all_of_it_in_one_run(drawn):
    _, spec = drawn
    whole = slice(0, spec.numel)
    assert spec.overlap(spec) == ([(whole, whole)] if spec.numel else [])


def test_overlap_of_rows_is_one_run_and_of_columns_one_run_a_row():
    shape = (4096, 64)
    rows = ShardSpec.of_boxes("w", shape, [Box((0, 0), (2048, 64))])
    later = ShardSpec.of_boxes("w", shape, [Box((1024, 0), (4096, 64))])
    columns = ShardSpec.of_boxes("w", shape, [column(shape, 4, 1)])

    assert rows.overlap(later) == [(slice(1024 * 64, 2048 * 64), slice(0, 1024 * 64))]
    runs = rows.overlap(columns)
    assert len(runs) == 2048
    assert runs[1] == (slice(64 + 16, 64 + 32), slice(16, 32))


def test_specs_of_tensors_of_different_shapes_do_not_overlap_but_raise():
    with pytest.raises(UsageError, match=r"\(3, 4\).*\(4, 3\)"):
        ShardSpec.full("a", (3, 4)).overlap(ShardSpec.full("b", (4, 3)))


def test_query_key_value_rows_interleaved_by_group_split_and_merge_by_their_real_places():
    # Rows [q0, q1, k0, v0, q2, q3, k1, v1]: four query heads, two key-value heads of one row.
    fused = torch.arange(8).reshape(8, 1)

    def row_boxes(*rows):
        return ShardSpec.of_boxes("qkv", (8, 1), [Box((row, 0), (row + 1, 1)) for row in rows])

    shards = [row_boxes(0, 1, 2, 3), row_boxes(4, 5, 6, 7)]
    apart = [row_boxes(0, 1, 4, 5), row_boxes(2, 6), row_boxes(3, 7)]

    held = [spec.extract(fused) for spec in shards]
    separate = reshard(shards, apart, held)

    assert [local.flatten().tolist() for local in held] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [local.flatten().tolist() for local in separate] == [[0, 1, 4, 5], [2, 6], [3, 7]]
    assert torch.equal(gather(shards, reshard(apart, shards, separate), (8, 1)), fused)


def test_shards_of_a_fused_gate_and_up_matrix_load_on_any_number_of_ranks_in_row_order():
    shape = (16, 2)
    whole = labels(shape)

    def cut(ranks):
        half = 8 // ranks
        return [
            ShardSpec.of_boxes(
                "gate_up",
                shape,
                [
                    Box((half * r, 0), (half * (r + 1), 2)),
                    Box((8 + half * r, 0), (8 + half * (r + 1), 2)),
                ],
            )
            for r in range(ranks)
        ]

    four = cut(4)
    held = [spec.extract(whole) for spec in four]

    assert held[1][:, 0].tolist() == [4, 6, 20, 22]
    for ranks in (1, 2, 8):
        built = reshard(four, cut(ranks), held)
        assert torch.equal(gather(cut(ranks), built, shape), whole)
    plain = reshard(four, [ShardSpec.full("gate_up", shape)], held)[0]
    assert torch.equal(plain, whole)


@pytest.mark.parametrize("saved", [2, 4])
@pytest.mark.parametrize("loaded", [1, 2, 3, 4])
def test_several_padded_buffers_reload_without_shifts(saved, loaded):
    # Two parameters in two optimizer groups, each group padded to a multiple of the ranks.
    values = {"w": torch.arange(1.0, 6.0), "b": torch.arange(11.0, 14.0)}

    def cut(name, ranks):
        numel = len(values[name])
        size = -(-numel // ranks)
        full = ShardSpec.full(name, (numel,))
        return [
            full.narrow(min(rank * size, numel), min((rank + 1) * size, numel))
            for rank in range(ranks)
        ]

    for name, value in values.items():
        have, want = cut(name, saved), cut(name, loaded)
        held = [spec.extract(value) for spec in have]
        rebuilt = reshard(have, want, [local.long() for local in held])
        assert torch.cat(rebuilt).tolist() == value.tolist()


@pytest.mark.parametrize("shape", [(5, 4), (1, 4), ()])
def test_uneven_rows_over_data_ranks_on_top_of_tensor_shards_gather_to_the_full_tensor(shape):
    whole = labels(shape)
    specs = []
    for tp in range(2 if shape else 1):
        for dp in range(2):
            if not shape:
                specs.append(ShardSpec.full("w", ()).narrow(dp, 1))
                continue
            rows = [0, -(-shape[0] // 2), shape[0]]
            box = Box((rows[dp], 2 * tp), (rows[dp + 1], 2 * tp + 2))
            specs.append(ShardSpec.of_boxes("w", shape, [box]))

    held = [spec.extract(whole) for spec in specs]

    assert sum(spec.numel for spec in specs) == whole.numel()
    assert torch.equal(gather(specs, held, shape), whole)
    full = reshard(specs, [ShardSpec.full("w", shape)], held)[0]
    assert torch.equal(full, whole)


# ---------------------------------------------------------------- plain data, checked


@given(spec_of_tensor())
def test_a_spec_survives_json(drawn):
    _, spec = drawn

    text = json.dumps(spec.to_json())

    assert ShardSpec.from_json(json.loads(text)) == spec


def test_a_spec_is_a_value():
    spec = ShardSpec.full("w", torch.Size([2, 3]), ["dp", "cp"])

    assert spec == ShardSpec("w", (2, 3), [Box((0, 0), (2, 3))], 0, 6, ("dp", "cp"))
    assert len({spec, ShardSpec.full("w", (2, 3), ("dp", "cp"))}) == 1
    assert spec.whole
    assert not spec.narrow(0, 5).whole
    with pytest.raises(AttributeError):
        spec.start = 1


SOUND = ShardSpec.full("w", (3,)).to_json()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Box((0,), (1, 2)), "as many starts as stops"),
        (lambda: Box((2,), (1,)), "0 <= start <= stop"),
        (lambda: Box((-1,), (1,)), "0 <= start <= stop"),
        (lambda: Box((0.5,), (1,)), "integers"),
        (lambda: ShardSpec.full("w", (2, -1)), "0 <= start <= stop"),
        (lambda: ShardSpec("w", (-1,), (), 0, 0), "negative"),
        (lambda: ShardSpec.of_boxes("w", (3,), [Box((0,), (4,))]), r"w: box .*within.*\(3,\)"),
        (lambda: ShardSpec.of_boxes("w", (3,), [Box((), ())]), "does not lie within"),
        (lambda: ShardSpec.full("w", (3,)).narrow(2, 4), "cannot narrow 3"),
        (lambda: ShardSpec("w", (3,), (Box((0,), (2,)),), 0, 3), "stop <= 2"),
        (lambda: ShardSpec.full("w", (3,), ["dp", "dp"]), "named twice"),
        (lambda: ShardSpec.full("w", (3,), "dp"), "sequence of names"),
        (lambda: ShardSpec.from_json({"name": "w"}), "has the fields"),
        (
            lambda: ShardSpec.from_json({**ShardSpec.full("w", (3,)).to_json(), "boxes": [3]}),
            "pairs",
        ),
        (lambda: ShardSpec.from_json(7), "has the fields .*, got int"),
        (lambda: ShardSpec.from_json({**SOUND, "name": 7}), "must be a text, got 7"),
        (lambda: ShardSpec.from_json({**SOUND, "start": 0.5}), "w has a field of another type"),
        (lambda: ShardSpec.from_json({**SOUND, "replicated": 7}), "w has a field of another type"),
        (lambda: ShardSpec.from_json({**SOUND, "replicated": [[]]}), "w has a field of another"),
        (
            lambda: ShardSpec.of_boxes("w", (4, 4), [Box((0, 0), (2, 2)), Box((1, 1), (3, 3))]),
            "share elements",
        ),
        (lambda: ShardSpec.full("w", (3,)).extract(torch.zeros(4)), r"\(3,\), got \(4,\)"),
        (
            lambda: ShardSpec.full("w", (2, 2)).insert(torch.zeros(1, 4), torch.zeros(2, 2)),
            r"\(2, 2\) or be flat, got \(1, 4\)",
        ),
        (
            lambda: ShardSpec.full("w", (2,)).insert(torch.zeros(2).double(), torch.zeros(2)),
            "convert it first",
        ),
    ],
)
def test_what_cannot_be_a_shard_is_refused_with_the_reason(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_empty_boxes_share_nothing():
    spec = ShardSpec.of_boxes("w", (4,), [Box((1,), (1,)), Box((0,), (4,)), Box((2,), (2,))])

    assert spec.local_shape == (4,)
    assert spec.extract(labels((4,))).tolist() == [0, 1, 2, 3]
