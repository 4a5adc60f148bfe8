"""What a microbatch leaves in memory from its forward to its backward, by the decoder's operators.

The operators are those of plain PyTorch with a fused attention kernel: nothing of the size of the
attention matrix exists. Every line of a sum is a tensor that autograd keeps.
"""

from __future__ import annotations

import attrs

from trainwright.sharding.memory.kept_bytes import BlockBytes, KeptBytes, Tokens
from trainwright.sharding.memory.shape import ExpertSizes, LatentSizes, TransformerShape
from trainwright.sharding.mesh import MeshShape
from trainwright.sharding.tensor import Cut, HeadLayout

_INT = 8
_FLOAT32 = 4


def decoder_bytes(
    shape: TransformerShape, layout: MeshShape, tokens: Tokens, *, tp_rank: int = 0
) -> KeptBytes:
    """Return what a microbatch of a decoder takes on a tensor rank.

    Tokens are taken to be sent to experts evenly.

    Args:
        shape: The model's.
        layout: The ranks.
        tokens: What a rank has of a microbatch.
        tp_rank: Which tensor rank.
    """
    rank = _Rank(shape, layout, tokens, tp_rank)
    attention = rank.attention()
    sparse = None
    if shape.experts is not None:
        sparse = _joined(attention, rank.experts(shape.experts))
    vocabulary = rank.share(shape.vocabulary)
    logits = tokens.compute * rank.rows * vocabulary
    table = tokens.compute * vocabulary * shape.width
    # The block before lives until the next one has its memory.
    at_once = min(rank.rows * vocabulary, 2 * max(tokens.block_of_loss, vocabulary))
    return KeptBytes(
        dense=_joined(attention, rank.feed_forward()),
        sparse=sparse,
        stream=rank.stream,
        keeps_stream=tokens.compute >= _wide(tokens.compute),
        head=rank.norm(rank.between, shape.width) + rank.stream,
        logits=logits,
        head_deferred=rank.stream + logits,
        loss=logits + (_wide(tokens.compute) * at_once if tokens.compute < _FLOAT32 else 0),
        head_backward=rank.around_product(table),
        norm_backward=rank.norm_backward(),
        table_gradient=table,
        segment=tokens.segment,
        keeps_products=tokens.keeps_products,
    )


@attrs.frozen
class _Rank:
    shape: TransformerShape
    layout: MeshShape
    tokens: Tokens
    tp_rank: int

    @property
    def rows(self) -> int:
        """Tokens of the rank."""
        return self.tokens.batch * self.tokens.sequence

    @property
    def between(self) -> int:
        """Those of its residual stream between products."""
        if not self.tokens.sequence_parallel:
            return self.rows
        cut = Cut.uneven(self.tokens.sequence, self.layout.tp)
        return self.tokens.batch * cut.numel(self.tp_rank)

    @property
    def stream(self) -> int:
        """Bytes of the residual stream between products."""
        return self.tokens.compute * self.between * self.shape.width

    @property
    def whole(self) -> int:
        """Bytes of a stream of all positions, as products make it."""
        return self.tokens.compute * self.rows * self.shape.width

    @property
    def gathered(self) -> int:
        """Bytes of a stream that is made whole for products; none where it is."""
        return self.whole if self.tokens.sequence_parallel else 0

    def around_product(self, matrix: int) -> int:
        """Return what the backward of a product of the stream makes, of a matrix of some bytes."""
        whole = self.whole
        if self.layout.tp == 1:
            return whole + matrix
        if not self.tokens.sequence_parallel:
            return whole + max(whole, matrix)  # its input's gradient travels when it is made
        # The input is made whole again, and its gradient is cut.
        return 2 * whole + max(whole + self.stream, matrix)

    def norm_backward(self) -> int:
        """Return what the backward of a norm takes beside what it kept."""
        wide = _wide(self.tokens.compute) * self.between * self.shape.width
        is_composite = not self.tokens.fused_norms and self.shape.norm_vectors == 1
        return (5 if is_composite else 2) * wide

    def share(self, number: int) -> int:
        return Cut.balanced(number, self.layout.tp).numel(self.tp_rank)

    def norm(self, rows: int, width: int, *, has_bias: bool | None = None) -> int:
        """Return what a norm keeps: its input in at least float32, and numbers a row."""
        wide = _wide(self.tokens.compute)
        is_layer = self.shape.norm_vectors == 2 if has_bias is None else has_bias
        if is_layer:
            return wide * rows * (width + 2)
        return wide * rows * (width * (1 if self.tokens.fused_norms else 2) + 1)

    def attention(self) -> BlockBytes:
        """Return what norm and attention keep: what products and kernel read, what it made."""
        if self.shape.latent is not None:
            return self._latent_attention(self.shape.latent)
        shape, e = self.shape, self.tokens.compute
        layout = HeadLayout(shape.heads, shape.kv_heads, shape.head_width, self.layout.tp)
        heads, kv_heads = layout.num_local(self.tp_rank), layout.num_local_kv(self.tp_rank)
        queries = e * self.rows * heads * shape.head_width
        keys = e * self.rows * kv_heads * shape.head_width
        kept = self.norm(self.between, shape.width) + self.stream
        kept += 2 * queries + 2 * keys + self._sums(heads)
        if shape.qk_norm:
            kept += self.norm(self.rows * heads, shape.head_width, has_bias=False)
            kept += self.norm(self.rows * kv_heads, shape.head_width, has_bias=False)
            # Heads that were normalised lie otherwise, and so does what the kernel makes of them:
            # the output product wants a copy.
            kept += queries
        deferred = 2 * self.stream + 2 * queries + 2 * keys
        extra = self.stream + 2 * queries + 2 * keys
        products = queries + 2 * keys + self.whole
        # What rotations and norms make of queries and keys is other memory.
        shared = queries + 2 * keys if shape.position_rows and not shape.qk_norm else keys
        return BlockBytes(kept, extra, extra, deferred, products, shared)

    def _latent_attention(self, latent: LatentSizes) -> BlockBytes:
        e, heads = self.tokens.compute, self.share(self.shape.heads)
        kept = self.norm(self.between, self.shape.width) + self.stream
        if latent.queries:
            kept += self.norm(self.between, latent.queries, has_bias=False)
            kept += e * self.between * latent.queries
        kept += (
            self.norm(self.between, latent.keys, has_bias=False) + e * self.between * latent.keys
        )
        if e >= _FLOAT32:
            kept += e * self.between * latent.turned  # the norm's input is a part of one product
        kernel = e * self.rows * heads * max(latent.key_width, latent.values)
        values = e * self.rows * heads * latent.values
        kept += 4 * kernel + values + self._sums(heads)
        small = e * self.between * (2 * latent.queries + 2 * latent.keys + latent.turned)
        made = e * self.rows * heads * (latent.key_width + latent.plain + latent.values)
        deferred = 2 * self.stream + small + made + values
        extra = self.stream + 4 * kernel
        products = small - e * self.between * (latent.queries + latent.keys) + made + self.whole
        return BlockBytes(kept, extra, extra, deferred, products)

    def _sums(self, heads: int) -> int:
        """Return the log-sum-exp of each query."""
        return max(_FLOAT32, self.tokens.compute) * self.rows * heads

    def feed_forward(self) -> BlockBytes:
        """Return what norm and products of a dense block keep."""
        width, features = self.shape.width, self.share(self.shape.mlp_width)
        hidden = self.tokens.compute * self.rows * features
        matrix = self.tokens.compute * features * width
        kept = self.norm(self.between, width) + self.stream
        if self.shape.gated:
            # Gate, activated gate, up, and their product.
            extra = self.stream + max(2 * hidden, hidden + matrix + self.gathered)
            apart, deferred = self.stream + 3 * hidden, 2 * self.stream + 3 * hidden
            products, shared = 2 * hidden + self.whole, 2 * hidden
            return BlockBytes(kept + 4 * hidden, extra, apart, deferred, products, shared)
        extra = self.stream + hidden + matrix + self.gathered
        apart, deferred = self.stream + 2 * hidden, 2 * self.stream + 2 * hidden
        return BlockBytes(kept + 2 * hidden, extra, apart, deferred, hidden + self.whole, hidden)

    def experts(self, experts: ExpertSizes) -> BlockBytes:
        """Return what norm, router and products of a block with experts keep."""
        shape, layout, e = self.shape, self.layout, self.tokens.compute
        wide, width = _wide(e), shape.width
        routed = -(-self.rows // layout.tp)
        rows = routed * experts.top_k * layout.etp
        features = experts.width // layout.etp
        kept = self.norm(self.between, width) + self.stream
        if e < wide:
            kept += wide * routed * width  # the router's input
        if layout.tp > 1 and not self.tokens.sequence_parallel:
            kept += e * routed * width
        kept += wide * routed * (3 * experts.number + 1)
        kept += routed * experts.top_k * (_INT + wide)
        kept += e * rows * (width + 4 * features) + e * routed * experts.top_k * width
        shared = self.share(experts.shared_width) if experts.shared_width else 0
        kept += 4 * e * self.rows * shared
        matrices = e * experts.number // layout.ep * features * width
        hidden, around = e * rows * features, self.stream + e * rows * width
        deferred = 2 * self.stream + e * rows * 2 * width + 3 * hidden
        deferred += 3 * e * self.rows * shared
        extra = around + max(2 * hidden, hidden + matrices)
        own = 2 * e * self.rows * shared
        products = wide * routed * experts.number + own + (self.whole if shared else 0)
        if self.tokens.grouped_products:
            own += 2 * hidden
            products += 2 * hidden + e * rows * width
        return BlockBytes(kept, extra, around + 3 * hidden, deferred, products, own)


def _joined(attention: BlockBytes, rest: BlockBytes) -> BlockBytes:
    """Return what both halves of a block hold; the second one's backward comes first."""
    return BlockBytes(
        attention.kept + rest.kept,
        max(rest.extra, attention.extra - rest.kept),
        max(rest.extra_apart, attention.extra_apart - rest.kept),
        attention.deferred + rest.deferred,
        attention.products + rest.products,
        attention.shared + rest.shared,
    )


def _wide(compute: int) -> int:
    return max(_FLOAT32, compute)
