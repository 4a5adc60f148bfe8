"""The sizes of a decoder that its memory depends on: plain numbers, validated where they are made.

Nothing here is a module. A model of one's own says what it is in these words.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from trainwright.sharding.errors import ShardingError


def _to_numbers(numbers: Iterable[int]) -> frozenset[int]:
    return frozenset(numbers)


@attrs.frozen
class ExpertSizes:
    """A mixture of gated experts.

    Args:
        number: Of experts.
        width: Hidden features of one.
        top_k: Experts that a token is sent to.
        shared_width: Hidden features of an expert that every token visits; 0: there is none.
        shared_gate: Whether that one's output is multiplied by a product of its own.
        biased: Whether scores have biases, which are buffers of at least float32.
    """

    number: int
    width: int
    top_k: int
    shared_width: int = 0
    shared_gate: bool = False
    biased: bool = False

    def __attrs_post_init__(self) -> None:
        _check_positive(self, "number", "width", "top_k")
        if self.top_k > self.number:
            raise ShardingError(f"top_k={self.top_k} of {self.number} experts; it is at most that")


@attrs.frozen
class LatentSizes:
    """Multi-head latent attention, as in DeepSeek-V2.

    Args:
        keys: Features of the vector that keys and values are made of.
        plain: Features of a query or key that its position does not turn.
        turned: Those that it does.
        values: Features of a value.
        queries: Features of the vector that queries are made of; 0: of the stream itself.
    """

    keys: int
    plain: int
    turned: int
    values: int
    queries: int = 0

    def __attrs_post_init__(self) -> None:
        _check_positive(self, "keys", "plain", "turned", "values")

    @property
    def key_width(self) -> int:
        """Features of a query or key."""
        return self.plain + self.turned


@attrs.frozen
class TransformerShape:
    """A pre-norm decoder.

    Args:
        vocabulary: Rows of the embedding.
        width: Features of the residual stream.
        layers: Blocks.
        heads: Query heads.
        kv_heads: Key/value heads; as many as ``heads`` without grouped queries.
        mlp_width: Hidden features of a dense feed-forward block.
        head_width: Features of a head; 0: ``width / heads``.
        gated: Whether a dense feed-forward block has three matrices (SwiGLU) or two (GELU).
        tied: Whether the head is the embedding.
        norm_vectors: Of a norm: 1 without a bias, 2 with one.
        position_rows: Of a table of learned positions; 0: positions are rotary.
        qkv_bias: Whether queries, keys and values have biases.
        output_bias: Whether the output of attention has one.
        mlp_bias: Whether the products of dense feed-forward blocks have.
        qk_norm: Whether queries and keys are normalised head by head.
        experts: What the feed-forward blocks are mixtures of; None: all are dense.
        dense_layers: Numbers of the blocks without experts, where others have some.
        latent: Sizes of latent attention; None: attention has query, key and value products.

    Raises:
        ShardingError: A size is not positive, or heads do not divide as they must.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    head_width: int = 0
    gated: bool = True
    tied: bool = False
    norm_vectors: int = 1
    position_rows: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertSizes | None = None
    dense_layers: frozenset[int] = attrs.field(default=frozenset(), converter=_to_numbers)
    latent: LatentSizes | None = None

    def __attrs_post_init__(self) -> None:
        _check_positive(
            self, "vocabulary", "width", "layers", "heads", "kv_heads", "mlp_width", "norm_vectors"
        )
        if not self.head_width:
            if self.width % self.heads:
                raise ShardingError(
                    f"width={self.width} is no multiple of heads={self.heads}; say head_width"
                )
            object.__setattr__(self, "head_width", self.width // self.heads)
        if self.heads % self.kv_heads:
            raise ShardingError(
                f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}"
            )

    def is_sparse(self, layer: int) -> bool:
        """Whether a block's feed-forward part is a mixture of experts."""
        return self.experts is not None and layer not in self.dense_layers


def _check_positive(value: attrs.AttrsInstance, *names: str) -> None:
    for name in names:
        if getattr(value, name) < 1:
            raise ShardingError(
                f"{type(value).__name__}: {name} must be positive, got {getattr(value, name)}"
            )
