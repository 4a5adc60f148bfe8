"""Hypothesis strategies for what ranks agree on: shapes, boxes, shard specs and random keys."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from trainwright.collectives.box import Box
from trainwright.collectives.random import Key
from trainwright.collectives.shard_spec import ShardSpec


def shapes(max_dims: int = 3, max_size: int = 7) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw tensor shapes, among them the shape of a scalar and shapes without elements."""
    with_elements = st.lists(st.integers(1, max_size), min_size=1, max_size=max_dims)
    any_sizes = st.lists(st.integers(0, max_size), max_size=max_dims)
    return st.one_of(with_elements, with_elements, any_sizes).map(tuple)


def keys() -> st.SearchStrategy[Key]:
    """Draw keys of random numbers with seeds and steps up to the largest allowed."""
    return st.builds(
        Key,
        seed=st.integers(0, 2**64 - 1),
        name=st.text(max_size=12),
        step=st.integers(0, 2**48 - 1),
    )


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """Draw a box of a tensor of ``shape``; it may be empty or the whole tensor."""
    start = tuple(draw(st.just(0) | st.integers(0, size)) for size in shape)
    stop = tuple(
        draw(st.just(size) | st.integers(first, size))
        for first, size in zip(start, shape, strict=True)
    )
    return Box(start, stop)


@st.composite
def box_partitions(draw: st.DrawFn, shape: Sequence[int], max_cuts: int = 6) -> list[Box]:
    """Draw boxes that together hold each element of a tensor of ``shape`` once, in any order."""
    found = [Box.full(shape)]
    for _ in range(draw(st.integers(0, max_cuts if shape else 0))):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(box.start[dim], box.stop[dim]))
        found.append(Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :])))
        found.append(Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop))
    return list(draw(st.permutations(found)))


@st.composite
def shard_partitions(
    draw: st.DrawFn, shape: Sequence[int], max_ranks: int = 3, max_ranges: int = 3
) -> list[ShardSpec]:
    """Draw the specs of ranks that together hold each element of a tensor of ``shape`` once.

    Boxes are dealt to up to ``max_ranks`` ranks, as tensor parallelism does, and what each holds is
    cut into up to ``max_ranges`` flat ranges, as ZeRO does. Ranks may hold nothing.
    """
    held: list[list[Box]] = [[] for _ in range(draw(st.integers(1, max_ranks)))]
    for box in draw(box_partitions(shape)):
        held[draw(st.integers(0, len(held) - 1))].append(box)
    found = []
    for owned in held:
        spec = ShardSpec.of_boxes("weight", shape, owned)
        ends = draw(st.lists(st.integers(0, spec.numel), max_size=max_ranges - 1).map(sorted))
        cuts = [0, *ends, spec.numel]
        found += [spec.narrow(*pair) for pair in itertools.pairwise(cuts)]
    return found
