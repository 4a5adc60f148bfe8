"""The plan of the flat buffers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.sharding.data import GroupKey, GroupLayout, ShardPolicy
from trainwright.sharding.data.layout import LayoutEntry, launch_order, plan_groups
from trainwright.sharding.errors import ShardingError

DENSE = GroupKey(("dp", "cp"), ("dp", "cp", "tp"), torch.float32, torch.float32)
NORMS = GroupKey(("dp", "cp", "tp"), ("dp", "cp", "tp"), torch.float32, torch.float32)
HALF = GroupKey(("dp", "cp"), ("dp", "cp", "tp"), torch.bfloat16, torch.float32)

entry_lists = st.lists(
    st.tuples(st.integers(1, 300), st.sampled_from([DENSE, NORMS, HALF])), max_size=12
).map(
    lambda drawn: [LayoutEntry(f"p{index}", numel, key) for index, (numel, key) in enumerate(drawn)]
)
plans = st.fixed_dictionaries(
    {
        "entries": entry_lists,
        "num_ranks": st.integers(1, 9),
        "bucket_bytes": st.integers(1, 2000),
        "alignment": st.sampled_from([1, 2, 8, 32]),
    }
)


def plan(
    entries: list[LayoutEntry], num_ranks: int, bucket_bytes: int, alignment: int
) -> tuple[GroupLayout, ...]:
    return plan_groups(entries, lambda _: num_ranks, bucket_bytes=bucket_bytes, alignment=alignment)


@given(drawn=plans)
def test_each_parameter_has_one_place_of_its_size_in_the_group_of_its_key(drawn: dict) -> None:
    layout = plan(**drawn)

    placed = {
        part.name: (group.key, part.stop - part.start)
        for group in layout
        for bucket in group.buckets
        for part in bucket.parameters
    }
    count = sum(len(bucket.parameters) for group in layout for bucket in group.buckets)

    assert placed == {entry.name: (entry.key, entry.numel) for entry in drawn["entries"]}
    assert count == len(drawn["entries"])


@given(drawn=plans)
def test_buckets_tile_their_group_and_ranks_tile_each_bucket(drawn: dict) -> None:
    num_ranks = drawn["num_ranks"]
    for group in plan(**drawn):
        at = 0
        for bucket in group.buckets:
            assert bucket.start == at
            ranges = [bucket.range_of(rank, num_ranks) for rank in range(num_ranks)]
            edges = [bucket.start, *(stop for _, stop in ranges)]
            assert [start for start, _ in ranges] == edges[:-1]
            assert edges[-1] == bucket.stop
            assert len({stop - start for start, stop in ranges}) == 1
            assert all(edge % drawn["alignment"] == 0 for edge in edges)
            at = bucket.stop
        assert at == group.numel


@given(drawn=plans)
def test_parameters_in_a_bucket_are_aligned_and_share_no_element(drawn: dict) -> None:
    for group in plan(**drawn):
        for bucket in group.buckets:
            at = bucket.start
            for part in bucket.parameters:
                assert part.start >= at
                assert part.start % drawn["alignment"] == 0
                at = part.stop
            assert at <= bucket.stop


@given(drawn=plans)
def test_a_bucket_of_several_parameters_is_no_larger_than_asked(drawn: dict) -> None:
    for group in plan(**drawn):
        for bucket in group.buckets:
            last = bucket.parameters[-1]
            filled = (last.stop - bucket.start) * group.key.master_dtype.itemsize
            assert len(bucket.parameters) == 1 or filled <= drawn["bucket_bytes"]


@given(drawn=plans)
def test_the_last_registered_parameters_are_reduced_first(drawn: dict) -> None:
    layout = plan(**drawn)
    expected = {entry.name: at for at, entry in enumerate(reversed(drawn["entries"]))}

    ready = [
        max(expected[part.name] for part in bucket.parameters) for _, bucket in launch_order(layout)
    ]

    assert ready == sorted(ready)
    for group in layout:
        order = [expected[part.name] for bucket in group.buckets for part in bucket.parameters]
        assert order == sorted(order)


@given(drawn=plans, factor=st.integers(2, 4))
def test_where_sharded_parameters_have_other_sizes_replicated_ones_still_lie_alike(
    drawn: dict, factor: int
) -> None:
    # Tensor-parallel ranks sum the gradients of their replicated parameters with each other.
    there = [
        LayoutEntry(e.name, e.numel if e.key is NORMS else e.numel * factor, e.key)
        for e in drawn["entries"]
    ]

    def order(entries: list[LayoutEntry]) -> list[object]:
        layout = plan(**{**drawn, "entries": entries})
        return [bucket for group, bucket in launch_order(layout) if group.key == NORMS]

    assert order(drawn["entries"]) == order(there)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, got 4"),
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1, got 0"),
        ({"alignment": 0}, "alignment must be at least 1 element, got 0"),
        ({"master_dtype": torch.bfloat16}, "float32 or float64, got torch.bfloat16"),
        ({"reduce_dtype": torch.int32}, "reduce_dtype must be None or one of .* got torch.int32"),
        ({"stage": 2, "release_after_forward": False}, "release_after_forward"),
    ],
)
def test_a_policy_out_of_range_names_the_field_and_the_value(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ShardingError, match=message):
        ShardPolicy(**options)


def test_float64_is_never_lowered() -> None:
    policy = ShardPolicy(reduce_dtype=torch.bfloat16)

    assert policy.master_dtype_of(torch.float64) == torch.float64
    assert policy.master_dtype_of(torch.float64, torch.bfloat16) == torch.float64
    assert policy.master_dtype_of(torch.bfloat16) == torch.float32
    assert policy.wire_dtype_of(torch.float64) == torch.float64
    assert policy.wire_dtype_of(torch.float32) == torch.bfloat16
