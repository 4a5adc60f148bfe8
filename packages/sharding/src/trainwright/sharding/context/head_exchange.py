"""From parts of the sequence with all heads to some heads with all of it, and back."""

# Shapes: B batch, H query heads, K key/value heads, S positions, E size of a head.

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import attrs
import torch

from trainwright.collectives import Communicator, differentiable
from trainwright.sharding.context.head_shares import HeadShare
from trainwright.sharding.context.time_order import (
    common,
    count,
    in_time_order,
    indices_of,
    size,
    take_ranges,
)
from trainwright.sharding.tensor.cuts import Ranges

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@attrs.frozen(eq=False)
class HeadExchange:
    """How the ranks of one all-to-all share heads.

    Args:
        comm: The ranks.
        held: By rank, the positions that it holds, in its order.
        shares: By rank, what it computes.
    """

    comm: Communicator
    held: tuple[Ranges, ...]
    shares: tuple[HeadShare, ...]

    def enter(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Three:
        """Return this rank's heads: its share of queries, keys and values of all positions.

        Communicates:
            One all-to-all; backward one more.
        """
        rank, mine = self.comm.rank, self.shares[self.comm.rank]
        sent = []
        for share in self.shares:
            rows = indices_of(self.held[rank], share.queries)
            kv = slice(*share.kv_heads)
            sent.append([take_ranges(q[:, slice(*share.heads)], rows, 2), k[:, kv], v[:, kv]])
        asked = [common(held, mine.queries) for held in self.held]
        batch, num_heads, num_kv = q.shape[0], size(mine.heads), size(mine.kv_heads)
        shapes = [
            [
                (batch, num_heads, count(rows), q.shape[-1]),
                (batch, num_kv, count(held), k.shape[-1]),
                (batch, num_kv, count(held), v.shape[-1]),
            ]
            for rows, held in zip(asked, self.held, strict=True)
        ]
        queries, keys, values = zip(*_exchange(sent, shapes, self.comm), strict=True)
        found_k, found_v = (in_time_order(parts, self.held, 2) for parts in (keys, values))
        if mine.repeats is not None:
            index = torch.tensor(mine.repeats, device=q.device)
            found_k, found_v = found_k.index_select(1, index), found_v.index_select(1, index)
        return in_time_order(queries, asked, 2), found_k, found_v

    def leave(self, out: torch.Tensor) -> torch.Tensor:
        """Return all heads of this rank's positions, from what each rank has computed.

        Communicates:
            One all-to-all; backward one more.
        """
        mine, here = self.shares[self.comm.rank], self.held[self.comm.rank]
        sent = [[take_ranges(out, indices_of(mine.queries, held), 2)] for held in self.held]
        asked = [common(here, share.queries) for share in self.shares]
        shapes = [
            [(out.shape[0], size(share.heads), count(rows), out.shape[-1])]
            for share, rows in zip(self.shares, asked, strict=True)
        ]
        parts = [part for (part,) in _exchange(sent, shapes, self.comm)]
        found = []
        for _, ranks in itertools.groupby(range(len(parts)), lambda rank: self.shares[rank].heads):
            sharing = list(ranks)
            found.append(in_time_order([parts[r] for r in sharing], [asked[r] for r in sharing], 2))
        return torch.cat(found, 1)


def _exchange(
    sent: Sequence[Sequence[torch.Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    comm: Communicator,
) -> list[tuple[torch.Tensor, ...]]:
    """Send tensors to each rank, and return those of known shapes that come from each."""
    flat = torch.cat([part.flatten() for parts in sent for part in parts])
    given = [sum(part.numel() for part in parts) for parts in sent]
    sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
    taken = [sum(of_rank) for of_rank in sizes]
    received = differentiable.all_to_all(flat, comm, taken, given)
    pieces = torch.split(received, [each for of_rank in sizes for each in of_rank])
    flat_shapes = [shape for of_rank in shapes for shape in of_rank]
    tensors = [piece.view(shape) for piece, shape in zip(pieces, flat_shapes, strict=True)]
    each = len(shapes[0])
    return [tuple(tensors[at : at + each]) for at in range(0, len(tensors), each)]
