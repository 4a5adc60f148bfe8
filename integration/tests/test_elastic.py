"""Layouts for other numbers of ranks: what stays, what changes, what is refused."""

from __future__ import annotations

import re

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.integration.elastic import Workload, fit, fitting
from trainwright.integration.errors import ConfigError
from trainwright.sharding import MeshShape, ShardingError

MOST = 20


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    sizes = {axis: draw(st.integers(1, 3)) for axis in ("pp", "cp", "tp")}
    dp = draw(st.integers(1, 6))
    layout = MeshShape(dp=dp, **sizes)
    stage = dp * sizes["cp"] * sizes["tp"]
    divisors = [n for n in range(1, stage + 1) if stage % n == 0]
    if draw(st.booleans()):
        layout = attrs.evolve(layout, etp=1, ep=draw(st.sampled_from(divisors)))
    elif draw(st.booleans()):
        shards = [n for n in range(1, dp + 1) if dp % n == 0]
        layout = attrs.evolve(layout, dp_shard=draw(st.sampled_from(shards)))
    microbatches, rows = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Workload(layout, dp * microbatches * rows, microbatches)


def shapes(work: Workload, ranks: int) -> list[MeshShape]:
    """All layouts of at most so many ranks that keep what a rank holds of a layer, by trying."""
    found = []
    for dp in range(1, ranks + 1):
        for shard in [None] if work.layout.dp_shard is None else range(1, dp + 1):
            try:
                shape = attrs.evolve(work.layout, dp=dp, dp_shard=shard)
            except ShardingError:
                continue
            if shape.world_size <= ranks and work.global_batch % dp == 0:
                found.append(shape)
    return found


@given(workloads(), st.integers(1, MOST))
def test_the_batch_stays_and_no_rank_holds_more_than_before(work: Workload, ranks: int) -> None:
    possible = shapes(work, ranks)
    if not possible:
        with pytest.raises(ConfigError):
            fit(work, ranks)
        return

    found = fit(work, ranks)

    assert found.layout in possible
    assert found.ranks == max(shape.world_size for shape in possible)
    assert found.global_batch == work.global_batch
    assert found.rows <= work.rows
    if work.layout.dp_shard is not None:
        assert found.layout.dp_shard is not None
        assert found.layout.dp_shard >= min(work.layout.dp_shard, found.layout.dp)
    for axis in ("pp", "cp", "tp", "ep", "etp"):
        assert getattr(found.layout, axis) == getattr(work.layout, axis)


@given(workloads(), st.integers(1, MOST))
def test_a_microbatch_has_as_many_rows_as_before_or_the_most_below_that(
    work: Workload, ranks: int
) -> None:
    for found in fitting(work, [ranks]):
        share = work.global_batch // found.layout.dp
        assert found.rows == max(n for n in range(1, work.rows + 1) if share % n == 0)


@given(workloads())
def test_on_the_same_ranks_a_run_is_the_same(work: Workload) -> None:
    assert fit(work, work.ranks, exactly=True) == work


@given(workloads(), st.integers(1, MOST))
def test_a_run_that_shrinks_and_grows_again_has_the_ranks_it_had(
    work: Workload, ranks: int
) -> None:
    for smaller in fitting(work, [ranks]):
        assert fit(smaller, work.ranks, exactly=True).layout.dp == work.layout.dp


@given(workloads(), st.integers(1, MOST), st.integers(1, 4))
def test_sizes_that_are_named_where_none_fits_do_fit(
    work: Workload, ranks: int, at_least: int
) -> None:
    try:
        fit(work, ranks, exactly=True, at_least=at_least)
    except ConfigError as error:
        named = re.search(r"; ([\d, ]+) ranks work", str(error))
        assert named is not None
        for size in map(int, named[1].split(",")):
            assert size >= at_least
            assert fit(work, size, exactly=True).ranks == size


def test_refusals_name_the_layout_the_batch_and_what_works() -> None:
    work = Workload(MeshShape.parse("dp=2,tp=2"), 16, 2)
    with pytest.raises(
        ConfigError, match=r"1 rank does not fit --layout dp=2,tp=2 .*; 2, 4, 8, 16"
    ):
        fit(work, 1)
    with pytest.raises(ConfigError, match=r"3 ranks do not fit .* at least 4 .*; 4, 8, 16 ranks"):
        fit(work, 3, at_least=4)
    with pytest.raises(ConfigError, match=r"multiple of dp=2 \* microbatches=3 = 6"):
        attrs.evolve(work, microbatches=3)
