"""The rank-to-host table: where each rank is, and which axes leave a host."""

from __future__ import annotations

import time

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.sharding import MeshShape, ShardingError
from trainwright.sharding.mesh import EXPERT_AXES, HYBRID_AXES, placement_table
from trainwright.sharding.testing import mesh_shapes, orders


@given(mesh_shapes(max_world_size=24), orders(), st.integers(1, 10))
def test_an_axis_spans_as_many_hosts_as_the_ranks_along_it_are_on(
    shape: MeshShape, order: tuple[str, ...], ranks_per_host: int
) -> None:
    shape = attrs.evolve(shape, order=order)
    table = placement_table(shape, ranks_per_host)

    for host in range(table.num_hosts):
        assert all(table.host(rank) == host for rank in table.ranks(host))
    assert sum(len(table.ranks(host)) for host in range(table.num_hosts)) == shape.world_size
    for axis, span in table.spans.items():
        groups = [shape.ranks(rank, axis) for rank in range(shape.world_size)]
        assert span == max(len({table.host(rank) for rank in group}) for group in groups)
    named = {axis for axis in ("pp", "dp", "cp", "tp") if shape.size(axis) > 1}
    assert named <= set(table.spans) <= named | set(EXPERT_AXES)
    assert set(table.leaving) == {axis for axis, span in table.spans.items() if span > 1}


def test_the_text_has_a_line_a_host_and_says_what_leaves_it() -> None:
    table = placement_table(MeshShape(pp=2, dp=4, tp=2), 4)

    assert str(table).splitlines() == [
        "host  ranks  pp   dp   tp",
        "   0    0-3   0  0-1  0-1",
        "   1    4-7   0  2-3  0-1",
        "   2   8-11   1  0-1  0-1",
        "   3  12-15   1  2-3  0-1",
        "pp=2 spans 2 hosts",
        "dp=4 spans 2 hosts",
        "tp=2 stays on a host",
    ]
    assert (table.leaving, table.warnings) == (("pp", "dp"), ())


@pytest.mark.parametrize(
    ("shape", "ranks_per_host", "warning"),
    [
        (MeshShape(dp=2, tp=4), 2, "tp=4 spans 2 hosts of 2 ranks, .* choose tp=2, which divides"),
        (MeshShape(dp=3, tp=4), 6, "tp=4 spans 2 hosts of 6 ranks, .* choose tp=3, which divides"),
        (
            MeshShape(dp=4, tp=2, order="tp/pp/dp/cp"),
            4,
            "tp=2 spans 2 hosts .* put tp innermost: order=pp/dp/cp/tp",
        ),
        (MeshShape(dp=8, ep=1, etp=8), 4, "etp=8 spans 2 hosts of 4 ranks"),
        (MeshShape(dp=5), 4, "the last host has 1 of 4 ranks"),
    ],
)
def test_a_tensor_axis_that_leaves_a_host_is_a_warning_with_the_way_out(
    shape: MeshShape, ranks_per_host: int, warning: str
) -> None:
    table = placement_table(shape, ranks_per_host)

    assert len(table.warnings) == 1
    with pytest.raises(ValueError, match=warning):
        raise ValueError(table.warnings[0])
    assert f"warning: {table.warnings[0]}" in str(table)


def test_the_parts_of_a_split_dp_have_spans_of_their_own() -> None:
    table = placement_table(MeshShape(dp=8, dp_shard=4, tp=2), 8)

    assert table.spans == {"dp": 2, "dp_replicate": 2, "dp_shard": 1, "tp": 1}
    assert set(HYBRID_AXES) > set(table.leaving) - {"dp"}


def test_the_ranks_of_thousands_of_hosts_are_placed_in_an_instant() -> None:
    began = time.process_time()
    table = placement_table(MeshShape(pp=16, dp=128, tp=8), 8)

    assert (table.num_hosts, table.spans) == (2048, {"pp": 16, "dp": 128, "tp": 1})
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: placement_table(MeshShape(), 0), "ranks_per_host must be a positive int, got 0"),
        (lambda: placement_table(MeshShape(), 2.0), "positive int, got 2.0"),
        (lambda: placement_table(MeshShape(dp=2), 2).host(2), "rank must be in 0..1, got 2"),
        (lambda: placement_table(MeshShape(dp=2), 2).ranks(1), "host must be in 0..0, got 1"),
    ],
)
def test_a_table_that_cannot_be_is_refused(make, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        make()
