"""The parameters that one rank holds of some blocks of a decoder, by name, with their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import attrs

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.memory.shape import TransformerShape
from trainwright.sharding.mesh import MeshShape
from trainwright.sharding.tensor import Cut, HeadLayout

EMBEDDING = "model.embed_tokens.weight"

Along = Literal["cut", "partial", "same"]
"""Over tp a parameter is cut, or whole with a part of its gradient on each rank, or just whole."""


@attrs.frozen
class Held:
    """What a rank holds of one parameter, before its states are shared out.

    Args:
        name: In the plain model.
        numel: Elements on this rank.
        along: How it lies over tp; of experts, which are cut over ep and etp, "cut".
        unit: The module with which it is gathered and reduced; "" is the model around the blocks.
        is_wide: Whether it stays in at least float32: norms and routers.
        is_expert: Whether it lies on the expert view of the mesh.
        is_at_both_ends: Whether the first and the last rank of a pipeline hold it, tied.
    """

    name: str
    numel: int
    along: Along
    unit: str = ""
    is_wide: bool = False
    is_expert: bool = False
    is_at_both_ends: bool = False


@attrs.frozen
class Slice:
    """Which blocks of the model one chunk of a pipeline rank is, with what is at its ends.

    Args:
        blocks: Numbers of the blocks.
        is_first: Whether it has the embedding.
        is_last: Whether it has the final norm and the head.
    """

    blocks: range
    is_first: bool
    is_last: bool


def slices_of(layers_of_stages: Iterable[range]) -> tuple[Slice, ...]:
    """Return the slices of all stages of a pipeline, in their order."""
    stages = list(layers_of_stages)
    last = len(stages) - 1
    return tuple(Slice(blocks, n == 0, n == last) for n, blocks in enumerate(stages))


def parameters_of(
    shape: TransformerShape,
    layout: MeshShape,
    slices: Iterable[Slice],
    *,
    tp_rank: int = 0,
    sequence_parallel: bool = False,
) -> tuple[Held, ...]:
    """Return what a rank holds of chunks that share their states out together.

    Args:
        shape: The model's.
        layout: The ranks.
        slices: One chunk, or the first and last one of a rank that share a tied embedding.
        tp_rank: Which tensor rank.
        sequence_parallel: Whether tensor ranks have other positions between products, so that each
            sees a part of a norm's gradient.

    Returns:
        In the order in which a model registers them.
    """
    chosen = list(slices)
    rank = _Rank(shape, layout, tp_rank, sequence_parallel)
    whole = [held for each in chosen for held in rank.blocks(each.blocks)]
    alone = layout.pp > 1 and len(chosen) == 1
    outside = [held for each in chosen for held in rank.around(each, alone)]
    unique = {held.name: held for held in outside}
    if len(chosen) > 1:
        return (*whole, *unique.values())
    before = [held for held in outside if held.name.startswith("model.embed")]
    after = [held for held in outside if not held.name.startswith("model.embed")]
    return (*before, *whole, *after)


@attrs.frozen
class _Rank:
    shape: TransformerShape
    layout: MeshShape
    tp_rank: int
    sequence_parallel: bool

    @property
    def on_stream(self) -> Along:
        return "partial" if self.sequence_parallel else "same"

    def share(self, number: int) -> int:
        """Return this rank's part of so many rows, which are shared out as evenly as can be."""
        return Cut.balanced(number, self.layout.tp).numel(self.tp_rank)

    def around(self, part: Slice, alone: bool) -> Iterator[Held]:
        """Yield embedding, positions, final norm and head.

        ``alone`` says that the other end of the model, if there is one, is on another rank.
        """
        shape = self.shape
        table = self.share(shape.vocabulary) * shape.width
        if part.is_first or (part.is_last and shape.tied):
            yield Held(EMBEDDING, table, "cut", is_at_both_ends=shape.tied and alone)
        if part.is_first and shape.position_rows:
            numel = shape.position_rows * shape.width
            yield Held("model.embed_positions.weight", numel, self.on_stream)
        if part.is_last:
            yield from self.norm("model.norm", shape.width, "")
        if part.is_last and not shape.tied:
            yield Held("lm_head.weight", table, "cut")

    def blocks(self, numbers: range) -> Iterator[Held]:
        """Yield the parameters of blocks."""
        for number in numbers:
            unit = f"model.layers.{number}"
            yield from self.norm(f"{unit}.input_layernorm", self.shape.width, unit)
            if self.shape.latent is None:
                yield from self.attention(unit)
            else:
                yield from self.latent_attention(unit)
            yield from self.norm(f"{unit}.post_attention_layernorm", self.shape.width, unit)
            yield from self.experts(unit) if self.shape.is_sparse(number) else self.dense(unit)

    def norm(self, name: str, width: int, unit: str, along: Along | None = None) -> Iterator[Held]:
        """Yield the vectors of a norm."""
        kinds = ("weight", "bias")[: self.shape.norm_vectors]
        for kind in kinds:
            yield Held(f"{name}.{kind}", width, along or self.on_stream, unit, is_wide=True)

    def product(
        self, name: str, sizes: tuple[int, int], unit: str, *, along: Along, bias: int = 0
    ) -> Iterator[Held]:
        """Yield a matrix of outputs times inputs, and a bias of so many elements."""
        yield Held(f"{name}.weight", sizes[0] * sizes[1], along, unit)
        if bias:
            yield Held(f"{name}.bias", bias, along, unit)

    def row_product(self, name: str, features: int, unit: str, bias: bool) -> Iterator[Held]:
        """Yield a product whose inputs are cut; its bias is whole."""
        width = self.shape.width
        yield Held(f"{name}.weight", width * features, "cut", unit)
        if bias:
            yield Held(f"{name}.bias", width, self.on_stream, unit)

    def attention(self, unit: str) -> Iterator[Held]:
        """Yield query, key, value and output products, shared out by heads, and heads' norms."""
        shape, tp = self.shape, self.layout.tp
        heads = HeadLayout(shape.heads, shape.kv_heads, shape.head_width, tp)
        queries = heads.query_cut().numel(self.tp_rank)
        keys = heads.kv_cut().numel(self.tp_rank)
        along: Along = "partial" if heads.kv_is_replicated else "cut"
        parts: tuple[tuple[str, int, Along], ...]
        parts = (("q", queries, "cut"), ("k", keys, along), ("v", keys, along))
        for name, rows, how in parts:
            yield from self.product(
                f"{unit}.self_attn.{name}_proj",
                (rows, shape.width),
                unit,
                along=how,
                bias=rows * shape.qkv_bias,
            )
        yield from self.row_product(f"{unit}.self_attn.o_proj", queries, unit, shape.output_bias)
        for name in ("q_norm", "k_norm") if shape.qk_norm else ():
            # Heads' norms have no bias; each tensor rank sees its own heads.
            yield Held(
                f"{unit}.self_attn.{name}.weight", shape.head_width, "partial", unit, is_wide=True
            )

    def latent_attention(self, unit: str) -> Iterator[Held]:
        """Yield what makes queries, keys and values of small vectors, which are whole."""
        shape, latent = self.shape, self.shape.latent
        assert latent is not None
        own, at, stream = self.share(shape.heads), f"{unit}.self_attn", self.on_stream
        bias = shape.qkv_bias
        if latent.queries:
            sizes = (latent.queries, shape.width)
            yield from self.product(
                f"{at}.q_a_proj", sizes, unit, along=stream, bias=bias * latent.queries
            )
            yield Held(f"{at}.q_a_layernorm.weight", latent.queries, stream, unit, is_wide=True)
        asking, name = (latent.queries, "q_b_proj") if latent.queries else (shape.width, "q_proj")
        yield from self.product(f"{at}.{name}", (own * latent.key_width, asking), unit, along="cut")
        made = latent.keys + latent.turned
        yield from self.product(
            f"{at}.kv_a_proj_with_mqa", (made, shape.width), unit, along=stream, bias=bias * made
        )
        yield Held(f"{at}.kv_a_layernorm.weight", latent.keys, stream, unit, is_wide=True)
        rows = own * (latent.plain + latent.values)
        yield from self.product(f"{at}.kv_b_proj", (rows, latent.keys), unit, along="cut")
        yield from self.row_product(f"{at}.o_proj", own * latent.values, unit, shape.output_bias)

    def dense(self, unit: str) -> Iterator[Held]:
        """Yield a dense feed-forward block."""
        shape, own = self.shape, self.share(self.shape.mlp_width)
        for name in ("gate_proj", "up_proj") if shape.gated else ("up_proj",):
            yield from self.product(
                f"{unit}.mlp.{name}",
                (own, shape.width),
                unit,
                along="cut",
                bias=own * shape.mlp_bias,
            )
        yield from self.row_product(f"{unit}.mlp.down_proj", own, unit, shape.mlp_bias)

    def experts(self, unit: str) -> Iterator[Held]:
        """Yield router, experts and what every token visits."""
        shape, experts, layout = self.shape, self.shape.experts, self.layout
        assert experts is not None
        if experts.number % layout.ep or experts.width % layout.etp:
            raise ShardingError(
                f"ep={layout.ep} must divide {experts.number} experts and etp={layout.etp} their "
                f"{experts.width} features"
            )
        routed: Along = "partial" if layout.tp > 1 else "same"
        yield Held(
            f"{unit}.mlp.gate.weight", experts.number * shape.width, routed, unit, is_wide=True
        )
        own = experts.number // layout.ep * (experts.width // layout.etp) * shape.width
        for name, matrices in (("gate_up_proj", 2), ("down_proj", 1)):
            yield Held(f"{unit}.mlp.experts.{name}", matrices * own, "cut", unit, is_expert=True)
        if experts.shared_width:
            features = self.share(experts.shared_width)
            for name in ("gate_proj", "up_proj", "down_proj"):
                at = f"{unit}.mlp.shared_expert.{name}.weight"
                yield Held(at, features * shape.width, "cut", unit)
        if experts.shared_gate:
            yield Held(f"{unit}.mlp.shared_expert_gate.weight", shape.width, self.on_stream, unit)
