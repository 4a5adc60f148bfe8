"""A projection that stays whole on every rank, each of which computes only the rows it needs."""

# Shapes: ... any leading dims, I in_features, O out_features; U the rows used on this rank.

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

import torch
from torch import nn

from trainwright.collectives import Communicator, random
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.placement.parameters import ParameterPlacement
from trainwright.sharding.placement.values import Partial
from trainwright.sharding.protocol import Products
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.linear import TensorOptions, reset, say_sizes, zeros
from trainwright.sharding.tensor.multiplication import multiplication_of
from trainwright.sharding.tensor.products import multiply_columns
from trainwright.sharding.tensor.sequence import SequenceSharding
from trainwright.sharding.tensor.shared_rows import sum_shared_rows


class KeyValueLinear(nn.Module):
    """A key or value projection whose heads are too few, or too uneven, to be shared out.

    ``weight`` and ``bias`` are the plain layer's, whole on every rank. Each rank computes the rows
    that its own query heads need, so its gradient is a term of the sum over the ranks: `Partial`
    on tp for weight and bias. It also serves a fused [Q; K; V] projection with such heads, under
    `HeadLayout.fused_by_block` or `HeadLayout.fused_by_group`.

    Args:
        in_features: I.
        out_features: O of the whole layer.
        tp: The tensor-parallel ranks.
        cut: Which rows each rank computes, as `HeadLayout.kv_used_cut` says.
        repeats: How many times the output holds each head of this rank, so that every query head
            finds one of its own (`HeadLayout.repeats`); None: once.
        bias: Whether to add a bias.
        input_is_entered: As in `ColumnParallelLinear`.
        sequence: As in `ColumnParallelLinear`.
        options: ``device`` and ``dtype`` of the parameters.

    Attributes:
        products: What computes the three products; None: plain products.

    Raises:
        ShardingError: The cut is of another size or over other ranks, or this rank's rows are not
            a multiple of the heads in ``repeats``.

    Communicates:
        As `ColumnParallelLinear`; the gradients of the parameters are summed by whoever reads
        `parameter_placements`. With ``products``, what `sum_shared_rows` says besides.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: Communicator,
        *,
        cut: Cut,
        repeats: Iterable[int] | None = None,
        bias: bool = False,
        input_is_entered: bool = False,
        sequence: SequenceSharding | None = None,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        if cut.size != out_features or cut.num_ranks != tp.size:
            raise ShardingError(
                f"out_features is {out_features} over tp={tp.size}, but the cut is {cut}"
            )
        self.repeats = None if repeats is None else tuple(repeats)
        if self.repeats is not None and cut.numel(tp.rank) % max(len(self.repeats), 1):
            raise ShardingError(
                f"rank {tp.rank} computes {cut.numel(tp.rank)} rows, which are no "
                f"{len(self.repeats)} heads, as repeats={self.repeats} says"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.tp = tp
        self.cut = cut
        self.input_is_entered = input_is_entered
        self.sequence = sequence
        self.products: Products | None = None
        self.weight = zeros((out_features, in_features), options)
        self.bias = zeros((out_features,), options) if bias else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``[..., I]`` to this rank's ``[..., U]``, heads repeated as asked."""
        output = multiply_columns(
            input,
            self._used(self.weight),
            None if self.bias is None else self._used(self.bias),
            self.tp,
            self.sequence,
            is_entered=self.input_is_entered,
            by=multiplication_of(self, self.products),
        )
        if self.products is not None:
            output = sum_shared_rows(output, self.tp, self.cut)
        if self.repeats is None or set(self.repeats) == {1}:
            return output
        heads = output.chunk(len(self.repeats), -1)
        repeated = [head for head, n in zip(heads, self.repeats, strict=True) for _ in range(n)]
        return torch.cat(repeated, -1)

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return where ``weight`` and ``bias`` lie: whole, their gradients terms of a sum."""
        shape = (self.out_features, self.in_features)
        terms = {"tp": Partial()}
        placements = {"weight": ParameterPlacement.replicated(shape, terms)}
        if self.bias is not None:
            placements["bias"] = ParameterPlacement.replicated(shape[:1], terms)
        return placements

    def feature_cuts(self) -> dict[str, tuple[Communicator, Cut]]:
        """Return which rows of the whole weight each rank multiplies."""
        return {"out_features": (self.tp, self.cut)}

    def reset_parameters(self, key: random.Key, std: float) -> None:
        """Draw ``weight`` by place under ``key`` and make ``bias`` zero."""
        reset(self.weight, self.bias, self.parameter_placements()["weight"], key, std)

    def extra_repr(self) -> str:
        """Say the sizes of the whole layer and the number of ranks that hold it."""
        return say_sizes(self.in_features, self.out_features, self.bias, self.tp)

    def _used(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows: on all ranks views, or on all ranks copies.

        A schedule takes only products with parameters, or views of them, apart: it has to be the
        same on every rank, because both halves may communicate.
        """
        part = self.cut.take(whole, 0, self.tp.rank)
        are_copies = any(len(ranges) > 1 for ranges in self.cut.ranges)
        is_copy = len(self.cut.ranges[self.tp.rank]) > 1
        return torch.cat([part]) if are_copies and not is_copy else part
