"""Hypothesis strategies: global tensors, and ways to cut them over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import attrs
import torch
from hypothesis import strategies as st

from trainwright.checkpointing.state import Sharded
from trainwright.collectives import Box, ShardSpec

AXES = ("pp", "dp", "tp")
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
)


@attrs.frozen
class Layout:
    """Which part of each tensor each rank holds.

    Args:
        sizes: Ranks along each axis; rank = (pp * DP + dp) * TP + tp.
        specs: For each rank the specs by path; a rank need not hold every path.
    """

    sizes: Mapping[str, int]
    specs: tuple[Mapping[str, ShardSpec], ...]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.specs)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's coordinate on each axis."""
        return coordinates_of(rank, self.sizes)

    def take(self, rank: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, Sharded]:
        """Return what the rank holds of the global tensors."""
        return {
            path: Sharded(spec.extract(tensors[path]), spec)
            for path, spec in self.specs[rank].items()
        }

    def empty(self, rank: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, Sharded]:
        """Return what the rank would hold, filled with zeros."""
        taken = self.take(rank, tensors)
        return {path: Sharded(torch.zeros_like(x.tensor), x.spec) for path, x in taken.items()}


def coordinates_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return a rank's coordinates, the last axis varying fastest."""
    result = {}
    for axis in reversed(AXES):
        rank, result[axis] = divmod(rank, sizes[axis])
    return result


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, tuple[int, ...]]:
    """Draw the shapes of a few tensors: some without dims, some empty, sizes that divide badly."""
    shape = st.lists(st.integers(0, 7) | st.integers(1, 13), max_size=3).map(tuple)
    return draw(st.dictionaries(st.sampled_from(["a", "b.c", "b.d.e", "z"]), shape, min_size=1))


@st.composite
def layouts(
    draw: st.DrawFn, of_shapes: Mapping[str, tuple[int, ...]], max_ranks: int = 8
) -> Layout:
    """Draw a mesh and a cut of every tensor over it.

    A tensor is on one or all pipeline stages; whole, or cut unevenly along one dim, perhaps as two
    fused halves, over tp; whole, or in uneven ranges, over dp.
    """
    mesh = st.tuples(*(st.integers(1, 3) for _ in AXES))
    drawn = draw(mesh.filter(lambda sizes: sizes[0] * sizes[1] * sizes[2] <= max_ranks))
    sizes = dict(zip(AXES, drawn, strict=True))
    world = drawn[0] * drawn[1] * drawn[2]
    specs: list[dict[str, ShardSpec]] = [{} for _ in range(world)]
    for path, shape in of_shapes.items():
        stage = draw(st.none() | st.integers(0, sizes["pp"] - 1))
        cut = draw(_cuts(path, shape, sizes, everywhere=stage is None))
        for rank in range(world):
            at = coordinates_of(rank, sizes)
            if stage in (None, at["pp"]):
                specs[rank][path] = cut[at["dp"], at["tp"]]
    return Layout(sizes, tuple(specs))


def random_tensors(
    of_shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int
) -> dict[str, torch.Tensor]:
    """Return tensors of random bits: every value of the dtype, NaNs too, occurs."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    result = {}
    for path, shape in of_shapes.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        bits = torch.randint(high, (count,), generator=generator, dtype=torch.uint8)
        result[path] = bits.view(dtype).reshape(shape)
    return result


@st.composite
def _cuts(
    draw: st.DrawFn,
    path: str,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    *,
    everywhere: bool,
) -> dict[tuple[int, int], ShardSpec]:
    replicated = ["pp"] if everywhere else []
    dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    boxes: list[list[Box]] = [[Box.full(shape)] for _ in range(sizes["tp"])]
    if dim is None:
        replicated.append("tp")
    else:
        # Two fused halves, as of [gate; up], are each cut over all ranks.
        halves = draw(st.sampled_from([[0, shape[dim]], [0, shape[dim] // 2, shape[dim]]]))
        boxes = [[] for _ in range(sizes["tp"])]
        for low, high in itertools.pairwise(halves):
            ends = draw(_ends(high - low, sizes["tp"]))
            for tp in range(sizes["tp"]):
                start, stop = [0] * len(shape), list(shape)
                start[dim], stop[dim] = low + ends[tp], low + ends[tp + 1]
                boxes[tp].append(Box(start, stop))
    over_dp = draw(st.booleans())
    if not over_dp:
        replicated.append("dp")
    specs = {}
    for tp in range(sizes["tp"]):
        whole = ShardSpec.of_boxes(path, shape, boxes[tp], replicated)
        ends = draw(_ends(whole.numel, sizes["dp"]))
        for dp in range(sizes["dp"]):
            specs[dp, tp] = whole.narrow(ends[dp], ends[dp + 1]) if over_dp else whole
    return specs


@st.composite
def _ends(draw: st.DrawFn, length: int, parts: int) -> list[int]:
    """Draw where ``length`` elements are cut into ``parts``, some of them perhaps empty."""
    inner = draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1))
    return [0, *sorted(inner), length]
