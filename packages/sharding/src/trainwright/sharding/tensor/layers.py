"""The layer that takes a plain module's place, with its parameters on the meta device still."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import nn

from trainwright.collectives import Communicator
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.conv1d import (
    ColumnParallelConv1D,
    RowParallelConv1D,
    is_conv1d,
)
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.embedding import VocabParallelEmbedding
from trainwright.sharding.tensor.key_value import KeyValueLinear
from trainwright.sharding.tensor.linear import ColumnParallelLinear, RowParallelLinear
from trainwright.sharding.tensor.plan import Match
from trainwright.sharding.tensor.sequence import SequenceSharding
from trainwright.sharding.tensor.styles import Column, KeyValue, Row, Vocab


@attrs.frozen(eq=False)
class Made:
    """A layer and how its parameters are cut from the plain module's.

    Args:
        layer: The layer.
        cuts: The cut and the dim of each parameter; absent ones are whole.
    """

    layer: nn.Module
    cuts: Mapping[str, tuple[Cut, int]]


@attrs.frozen(eq=False)
class _Plain:
    """What a plain linear module computes."""

    in_features: int
    out_features: int
    is_transposed: bool
    has_bias: bool
    weight: nn.Parameter

    @classmethod
    def of(cls, each: Match, style: object) -> _Plain:
        module = each.module
        is_transposed = is_conv1d(module)
        is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if not is_transposed and not is_linear:
            raise ShardingError(
                f"{each.name} is a {type(module).__name__}, but {type(style).__name__} replaces "
                "modules that compute what nn.Linear or GPT-2's Conv1D does; leave it out of the "
                "plan to keep it whole"
            )
        weight = module.get_parameter("weight")
        rows, columns = weight.shape
        sizes = (rows, columns) if is_transposed else (columns, rows)
        return cls(*sizes, is_transposed, getattr(module, "bias", None) is not None, weight)


def make_linear(
    style: Column | Row | KeyValue,
    each: Match,
    tp: Communicator,
    *,
    is_entered: bool,
    sequence: SequenceSharding | None,
) -> Made:
    """Return the layer for a linear module.

    Args:
        style: Of the module.
        each: The module.
        tp: The tensor-parallel ranks.
        is_entered: Whether the input's gradient is summed elsewhere.
        sequence: How a column's input or a row's output is cut by positions.

    Raises:
        ShardingError: The module is of another kind, or its sizes do not fit.
    """
    plain = _Plain.of(each, style)
    try:
        if isinstance(style, Row):
            return _row(style, plain, tp, sequence)
        if isinstance(style, Column):
            return _column(style, plain, tp, is_entered, sequence)
        return _key_value(style, plain, tp, is_entered, sequence)
    except ShardingError as error:
        raise type(error)(f"{each.name}: {error}") from None


def make_embedding(style: Vocab, each: Match, tp: Communicator) -> Made:
    """Return the layer for an embedding.

    Raises:
        ShardingError: The embedding does what the layer does not, or its size does not fit.
    """
    plain = each.module
    assert isinstance(plain, nn.Embedding)
    if plain.max_norm is not None or plain.scale_grad_by_freq or plain.sparse:
        raise ShardingError(
            f"{each.name}: an embedding with max_norm, scale_grad_by_freq or sparse cannot be cut; "
            "make it without them"
        )
    try:
        cut = style.cut or Cut.even(plain.num_embeddings, tp.size, "num_embeddings")
        layer = VocabParallelEmbedding(
            plain.num_embeddings,
            plain.embedding_dim,
            tp,
            cut=cut,
            padding_idx=plain.padding_idx,
            device="meta",
            dtype=plain.weight.dtype,
        )
    except ShardingError as error:
        raise type(error)(f"{each.name}: {error}") from None
    return Made(layer, {"weight": (cut, 0)})


def _column(
    style: Column,
    plain: _Plain,
    tp: Communicator,
    is_entered: bool,
    sequence: SequenceSharding | None,
) -> Made:
    cut = style.cut or _even(plain.out_features, tp, "out_features", style.unit, style.blocks)
    kind = ColumnParallelConv1D if plain.is_transposed else ColumnParallelLinear
    layer = kind(
        plain.in_features,
        plain.out_features,
        tp,
        cut=cut,
        bias=plain.has_bias,
        gather_output=style.gather_output,
        input_is_entered=is_entered,
        sequence=sequence,
        device="meta",
        dtype=plain.weight.dtype,
    )
    cuts = {"weight": (cut, 1 if plain.is_transposed else 0)}
    return Made(layer, {**cuts, "bias": (cut, 0)} if plain.has_bias else cuts)


def _row(style: Row, plain: _Plain, tp: Communicator, sequence: SequenceSharding | None) -> Made:
    cut = style.cut or _even(plain.in_features, tp, "in_features", style.unit, 1)
    kind = RowParallelConv1D if plain.is_transposed else RowParallelLinear
    layer = kind(
        plain.in_features,
        plain.out_features,
        tp,
        cut=cut,
        bias=plain.has_bias,
        input_is_parallel=not style.input_is_whole,
        sequence=sequence,
        device="meta",
        dtype=plain.weight.dtype,
    )
    return Made(layer, {"weight": (cut, 0 if plain.is_transposed else 1)})


def _key_value(
    style: KeyValue,
    plain: _Plain,
    tp: Communicator,
    is_entered: bool,
    sequence: SequenceSharding | None,
) -> Made:
    heads = style.heads
    if not heads.kv_is_replicated:
        return _column(Column(heads.kv_cut()), plain, tp, is_entered, sequence)
    if plain.is_transposed:
        raise ShardingError("KeyValue() with heads that several ranks share needs an nn.Linear")
    layer = KeyValueLinear(
        plain.in_features,
        plain.out_features,
        tp,
        cut=heads.kv_used_cut(),
        repeats=style.repeats(tp.rank),
        bias=plain.has_bias,
        input_is_entered=is_entered,
        sequence=sequence,
        device="meta",
        dtype=plain.weight.dtype,
    )
    return Made(layer, {})


def _even(size: int, tp: Communicator, what: str, unit: int, blocks: int) -> Cut:
    """Return the cut of equal blocks, each into equal parts of whole units."""
    if size % (unit * blocks):
        raise ShardingError(f"{what} is {size}, which is no {blocks} blocks of units of {unit}")
    units = size // (unit * blocks)
    named = what if unit == blocks == 1 else f"{what} {size} in units of {unit}"
    return Cut.joined(*[Cut.even(units, tp.size, named).scaled(unit)] * blocks)
