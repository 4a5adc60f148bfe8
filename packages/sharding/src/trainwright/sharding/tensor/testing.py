"""A block with every kind of layer, plain and in parallel, and what it moves and keeps."""

# Shapes: B batch, S sequence, D model, H heads, K key/value heads, E of a head, M middle.

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from trainwright.collectives import Communicator, ShardSpec, differentiable
from trainwright.sharding.mesh.mesh import Mesh
from trainwright.sharding.norm import one_norm
from trainwright.sharding.placement.parameters import placements_of, shard_spec
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.dropout import PlacedDropout, ShardedDim
from trainwright.sharding.tensor.heads import HeadLayout
from trainwright.sharding.tensor.key_value import KeyValueLinear
from trainwright.sharding.tensor.linear import ColumnParallelLinear, RowParallelLinear
from trainwright.sharding.tensor.replicated import place_partial_
from trainwright.sharding.tensor.sequence import SequenceSharding, enter_sequence


@attrs.frozen
class BlockPlan:
    """The sizes of a block and how its products are written.

    Args:
        num_heads: H.
        num_kv_heads: K.
        head_dim: E.
        width: D.
        middle: M.
        fused: "none", "block" for [Q; K; V] or "group" for [q.. k v] group after group.
        bias: Whether products add one.
        p: Of the dropout on the attention's output.
        dtype: Of everything.
    """

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 2
    width: int = 6
    middle: int = 5
    fused: str = "none"
    bias: bool = True
    p: float = 0.25
    dtype: torch.dtype = torch.float64

    def layout(self, ranks: int) -> HeadLayout:
        """Return how the heads are shared out over ranks."""
        return HeadLayout(self.num_heads, self.num_kv_heads, self.head_dim, ranks)


class PlainBlock(nn.Module):
    """The block in one process, of PyTorch's own layers, with values drawn from a seed."""

    def __init__(self, plan: BlockPlan, seed: int = 0) -> None:
        super().__init__()
        self.plan = plan
        options: dict[str, Any] = {"bias": plan.bias, "dtype": plan.dtype}
        queries, keys = plan.num_heads * plan.head_dim, plan.num_kv_heads * plan.head_dim
        self.norm = nn.LayerNorm(plan.width, dtype=plan.dtype)
        if plan.fused == "none":
            self.q = nn.Linear(plan.width, queries, **options)
            self.k = nn.Linear(plan.width, keys, **options)
            self.v = nn.Linear(plan.width, keys, **options)
        else:
            self.qkv = nn.Linear(plan.width, queries + 2 * keys, **options)
        self.head_norm = nn.RMSNorm(plan.head_dim, dtype=plan.dtype)
        self.out = nn.Linear(queries, plan.width, **options)
        self.drop = PlacedDropout(plan.p, 3, "drop")
        self.middle_norm = nn.RMSNorm(plan.width, dtype=plan.dtype)
        self.gate_up = nn.Linear(plan.width, 2 * plan.middle, **options)
        self.down = nn.Linear(plan.middle, plan.width, **options)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Return the block's output ``[B, S, D]``."""
        q, k, v = self._project(self.norm(hidden_BSD))
        group = self.plan.num_heads // self.plan.num_kv_heads
        mixed = attend(
            self.head_norm(q),
            self.head_norm(k).repeat_interleave(group, 2),
            v.repeat_interleave(group, 2),
        )
        hidden_BSD = hidden_BSD + self.drop(self.out(mixed))
        gate, up = self.gate_up(self.middle_norm(hidden_BSD)).chunk(2, -1)
        output: torch.Tensor = hidden_BSD + self.down(F.silu(gate) * up)
        return output

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plan = self.plan
        ends = (-1, plan.head_dim)
        if plan.fused == "none":
            return tuple(each(hidden).unflatten(-1, ends) for each in (self.q, self.k, self.v))
        rows = self.qkv(hidden).unflatten(-1, ends)
        if plan.fused == "block":
            parts = rows.split([plan.num_heads, plan.num_kv_heads, plan.num_kv_heads], 2)
            return tuple(parts)
        groups = rows.unflatten(2, (plan.num_kv_heads, -1))
        return groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1]


class ParallelBlock(nn.Module):
    """One rank's part of the block; its parameters have the plain block's names.

    Args:
        plan: Sizes.
        tp: The tensor-parallel ranks.
        sequence: How positions are cut between products; None where they are not.
        enters: Whether the input of several columns is gathered once, before them.
    """

    def __init__(
        self,
        plan: BlockPlan,
        tp: Communicator,
        sequence: SequenceSharding | None = None,
        enters: bool = True,
    ) -> None:
        super().__init__()
        self.plan, self.tp, self.sequence, self.enters = plan, tp, sequence, enters
        self.heads = plan.layout(tp.size)
        options: dict[str, Any] = {"bias": plan.bias, "dtype": plan.dtype, "sequence": sequence}
        self.norm = nn.LayerNorm(plan.width, dtype=plan.dtype)
        self._add_projections({**options, "input_is_entered": enters})
        self.head_norm = place_partial_(nn.RMSNorm(plan.head_dim, dtype=plan.dtype))
        cut = self.heads.query_cut()
        self.out = RowParallelLinear(cut.size, plan.width, tp, cut=cut, **options)
        shards = []
        if sequence is not None:
            length = None if sequence.length is None else Cut.uneven(sequence.length, tp.size)
            shards = [ShardedDim(sequence.dim, tp.rank, tp.size, length)]
        self.drop = PlacedDropout(plan.p, 3, "drop", shards=shards)
        self.middle_norm = nn.RMSNorm(plan.width, dtype=plan.dtype)
        half = Cut.uneven(plan.middle, tp.size)
        both = Cut.joined(half, half)
        self.gate_up = ColumnParallelLinear(plan.width, both.size, tp, cut=both, **options)
        self.down = RowParallelLinear(plan.middle, plan.width, tp, cut=half, **options)
        if sequence is not None:
            place_partial_(self.norm)
            place_partial_(self.middle_norm)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Map the whole hidden states, or this rank's positions of them, to the same of the output.

        Between the products each rank has heads and outputs of its own.
        """
        normed = self.norm(hidden_BSD)
        if self.enters:
            normed = self._enter(normed)
        q, k, v = self._project(normed)
        mixed = attend(self.head_norm(q), self._repeated(self.head_norm(k)), self._repeated(v))
        hidden_BSD = hidden_BSD + self.drop(self.out(mixed))
        gate, up = self.gate_up(self.middle_norm(hidden_BSD)).chunk(2, -1)
        output: torch.Tensor = hidden_BSD + self.down(F.silu(gate) * up)
        return output

    def _add_projections(self, options: dict[str, Any]) -> None:
        width, tp, heads = self.plan.width, self.tp, self.heads
        kv_kind: type[nn.Module] = ColumnParallelLinear
        if heads.kv_is_replicated:
            kv_kind = KeyValueLinear
        if self.plan.fused != "none":
            by_block = self.plan.fused == "block"
            cut = heads.fused_by_block() if by_block else heads.fused_by_group()
            self.qkv = kv_kind(width, cut.size, tp, cut=cut, **options)
            return
        cut = heads.query_cut()
        self.q = ColumnParallelLinear(width, cut.size, tp, cut=cut, **options)
        cut = heads.kv_used_cut()
        self.k = kv_kind(width, cut.size, tp, cut=cut, **options)
        self.v = kv_kind(width, cut.size, tp, cut=cut, **options)

    def _enter(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.sequence is None:
            return differentiable.replicate_to_partial(hidden, self.tp)
        return enter_sequence(hidden, self.tp, self.sequence)

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ends = (-1, self.plan.head_dim)
        if self.plan.fused == "none":
            return tuple(each(hidden).unflatten(-1, ends) for each in (self.q, self.k, self.v))
        by_block = self.plan.fused == "block"
        rank = self.tp.rank
        cut = self.heads.parts_by_block(rank) if by_block else self.heads.parts_by_group(rank)
        rows = self.qkv(hidden)
        parts = [cut.take(rows, -1, part) for part in range(3)]
        return tuple(part.reshape(*part.shape[:-1], *ends) for part in parts)

    def _repeated(self, kv_BSKE: torch.Tensor) -> torch.Tensor:
        repeats = self.heads.repeats(self.tp.rank)
        heads = [kv_BSKE[:, :, i : i + 1] for i, n in enumerate(repeats) for _ in range(n)]
        return torch.cat(heads, 2)


def attend(q_BSHE: torch.Tensor, k_BSHE: torch.Tensor, v_BSHE: torch.Tensor) -> torch.Tensor:
    """Return causal attention ``[B, S, H * E]``."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BSHE, k_BSHE, v_BSHE))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@attrs.frozen(eq=False)
class _Held:
    parameter: torch.Tensor
    spec: ShardSpec


def reduce_gradients_(model: nn.Module, mesh: Mesh) -> float:
    """Sum each gradient over the axes that its placement says and return the one norm.

    A parameter without a gradient gets one of zeros, as its ranks may have one.
    """
    placements = placements_of(model)
    pieces = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        axes = [axis for axis in placements[name].reduction_axes if mesh.size(axis) > 1]
        if axes:
            mesh.communicator(*axes).all_reduce(parameter.grad).wait()
        pieces.append(_Held(parameter, shard_spec(name, placements[name], mesh)))
    return float(one_norm(mesh, pieces).norm)


class SavedBytes:
    """How many bytes of activations a forward keeps for its backward, each storage once.

    Args:
        parameters: What is not counted.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._kept: list[torch.Tensor] = []
        self.total = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Count what is saved within the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            # Held, so that the address is not given to another storage while counting.
            self._kept.append(tensor.detach())
            self.total += storage.nbytes()
        return tensor
