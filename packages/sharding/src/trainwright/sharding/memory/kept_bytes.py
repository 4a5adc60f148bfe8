"""What a microbatch leaves in memory, and what that depends on besides sizes: plain values."""

from __future__ import annotations

import attrs

from trainwright.sharding.errors import ShardingError


@attrs.frozen
class BlockBytes:
    """What one block holds of one microbatch.

    Args:
        kept: Bytes from its forward to its backward, its input where a norm keeps that.
        extra: Most bytes beside these during its backward.
        extra_apart: The same of input gradients alone, where products' inputs stay.
        deferred: Bytes between a backward's input gradients and its weight gradients, where these
            are apart: inputs of products, and gradients of what they made.
        products: What products with weights make, which selective recomputation keeps.
        shared: What of that is in ``kept`` too.
    """

    kept: int
    extra: int
    extra_apart: int
    deferred: int
    products: int = 0
    shared: int = 0


@attrs.frozen
class KeptBytes:
    """What one microbatch takes on a rank.

    Args:
        dense: Of a block without experts.
        sparse: Of a block with experts; None: there are none.
        stream: Of the residual stream, which is what a recomputed block keeps.
        keeps_stream: Whether ``kept`` of a block holds its input already.
        head: From the last stage's forward to its backward, logits apart: final norm, head's input.
        logits: Of the logits, which live as long.
        head_deferred: Of the head's product, as in `BlockBytes`.
        loss: Most beside these while the loss and its gradient are computed.
        head_backward: Most beside the rest while the head's backward runs, when the logits'
            gradient has come in their place.
        norm_backward: Most beside the rest while the final norm's runs.
        table_gradient: Of a whole gradient of the embedding, before it is added where gradients
            lie.
        segment: Blocks that are recomputed together; 0: none are.
        keeps_products: Whether results of products are kept where blocks are recomputed.
    """

    dense: BlockBytes
    sparse: BlockBytes | None
    stream: int
    keeps_stream: bool
    head: int
    logits: int
    head_deferred: int
    loss: int
    head_backward: int
    norm_backward: int
    table_gradient: int
    segment: int = 0
    keeps_products: bool = False

    def recomputed(self, block: BlockBytes, *, is_first: bool = True) -> int:
        """Return what a recomputed block keeps: its segment's input if first, products' results."""
        return self.stream * is_first + block.products * self.keeps_products

    def again(self, block: BlockBytes) -> int:
        """Return what the recomputation of a block makes, its input among that."""
        return block.kept - block.shared * self.keeps_products


@attrs.frozen
class Tokens:
    """What of a microbatch a rank has, and in which formats.

    Args:
        batch: Sequences of a microbatch.
        sequence: Tokens of a sequence on this rank, after context parallelism.
        compute: Bytes of a number in products: 2, 4 or 8.
        sequence_parallel: Whether tensor ranks have a part of the positions each between products.
        fused_norms: Whether a norm is one kernel, which keeps its input alone. PyTorch's composite
            one on processors keeps the normalised stream as well.
        segment: Blocks that are recomputed together; 0: none are.
        keeps_products: Whether results of products with weights are kept then.
        grouped_products: Whether all experts' products are one kernel, whose results can be kept;
            one by one they are written into memory that is there.
        block_of_loss: Logits that the loss works on at once.
    """

    batch: int
    sequence: int
    compute: int = 2
    sequence_parallel: bool = False
    fused_norms: bool = True
    segment: int = 0
    keeps_products: bool = False
    grouped_products: bool = False
    block_of_loss: int = 1 << 24

    def __attrs_post_init__(self) -> None:
        if min(self.batch, self.sequence) < 1 or self.segment < 0:
            raise ShardingError(f"batch and sequence must be positive, got {self}")
        if self.keeps_products and not self.segment:
            raise ShardingError(f"products are kept where blocks are recomputed, got {self}")
        if self.compute not in (2, 4, 8):
            raise ShardingError(f"compute takes 2, 4 or 8 bytes a number, got {self.compute}")
