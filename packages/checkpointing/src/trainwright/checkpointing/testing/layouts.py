"""Hypothesis strategies: global tensors, and ways to cut them over ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import attrs
import torch
from hypothesis import strategies as st

from trainwright.checkpointing.state import Sharded
from trainwright.collectives import Box, ShardSpec

AXES = ("pp", "dp", "ep", "tp")
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
        sizes: Ranks along each axis; rank = ((pp * DP + dp) * EP + ep) * TP + tp.
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

    A tensor is on one or all pipeline stages and on one or all expert ranks (an expert with a name
    of its own, or what all share). There it is whole, or cut unevenly along any dim, over the
    expert ranks (experts stacked in one tensor), and besides over tp, perhaps in up to three fused
    parts in any order; and then whole, or in uneven ranges, over dp.
    """
    mesh = st.tuples(*(st.integers(1, 3) for _ in AXES))
    drawn = draw(mesh.filter(lambda sizes: math.prod(sizes) <= max_ranks))
    sizes = dict(zip(AXES, drawn, strict=True))
    specs: list[dict[str, ShardSpec]] = [{} for _ in range(math.prod(drawn))]
    for path, shape in of_shapes.items():
        only = {axis: draw(st.none() | st.integers(0, sizes[axis] - 1)) for axis in ("pp", "ep")}
        cut = draw(_cuts(path, shape, sizes, [axis for axis in only if only[axis] is None]))
        for rank in range(len(specs)):
            at = coordinates_of(rank, sizes)
            if all(place in (None, at[axis]) for axis, place in only.items()):
                specs[rank][path] = cut[at["dp"], at["ep"], at["tp"]]
    return Layout(sizes, tuple(specs))


def random_tensors(
    of_shapes: Mapping[str, tuple[int, ...]],
    dtypes: torch.dtype | Mapping[str, torch.dtype],
    seed: int,
) -> dict[str, torch.Tensor]:
    """Return tensors of random bits, of one dtype or one a path: every value, NaNs too, occurs."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for path, shape in of_shapes.items():
        dtype = dtypes if isinstance(dtypes, torch.dtype) else dtypes[path]
        high = 2 if dtype == torch.bool else 256
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
    everywhere: Sequence[str],
) -> dict[tuple[int, int, int], ShardSpec]:
    replicated = [axis for axis in everywhere if axis != "ep"]
    dims = st.none() | st.integers(0, len(shape) - 1) if shape else st.none()
    # Where an axis does not cut, one entry stands for all of its ranks.
    over_ep = [[Box.full(shape)]]
    dim = draw(dims) if "ep" in everywhere else None
    if dim is not None:
        over_ep = draw(_split(over_ep[0], dim, sizes["ep"], 1))
    elif "ep" in everywhere:
        replicated.append("ep")
    dim, num_fused, over_dp = draw(dims), draw(st.integers(1, 3)), draw(st.booleans())
    replicated += ["tp"] * (dim is None) + ["dp"] * (not over_dp)
    cuts: list[list[list[ShardSpec]]] = []
    for held in over_ep:
        over_tp = [held] if dim is None else draw(_split(held, dim, sizes["tp"], num_fused))
        cuts.append([])
        for boxes in over_tp:
            whole = ShardSpec.of_boxes(path, shape, boxes, replicated)
            ends = draw(_ends(whole.numel, sizes["dp"])) if over_dp else [0, whole.numel]
            cuts[-1].append([whole.narrow(*pair) for pair in itertools.pairwise(ends)])
    specs = {}
    for dp, ep, tp in itertools.product(*(range(sizes[axis]) for axis in ("dp", "ep", "tp"))):
        over_tp_here = cuts[ep % len(cuts)]
        over_dp_here = over_tp_here[tp % len(over_tp_here)]
        specs[dp, ep, tp] = over_dp_here[dp % len(over_dp_here)]
    return specs


@st.composite
def _split(
    draw: st.DrawFn, boxes: Sequence[Box], dim: int, parts: int, num_fused: int
) -> list[list[Box]]:
    """Draw a cut of boxes along ``dim``: each of ``num_fused`` layers of it over all parts."""
    result: list[list[Box]] = [[] for _ in range(parts)]
    for box in boxes:
        low, high = box.start[dim], box.stop[dim]
        layers = draw(_ends(high - low, num_fused))
        for first, last in itertools.pairwise(layers):
            ends = draw(_ends(last - first, parts))
            for part in range(parts):
                start, stop = list(box.start), list(box.stop)
                start[dim], stop[dim] = low + first + ends[part], low + first + ends[part + 1]
                result[part].append(Box(start, stop))
    backwards = draw(st.booleans())
    return [held[::-1] if backwards else held for held in result]


@st.composite
def _ends(draw: st.DrawFn, length: int, parts: int) -> list[int]:
    """Draw where ``length`` elements are cut into ``parts``, some of them perhaps empty."""
    inner = draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1))
    return [0, *sorted(inner), length]
