"""Floating-point operations of training, with every convention that people count by as a switch."""

from __future__ import annotations

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.integration.model.shape import ModelShape

BACKWARD = 2.0
"""Of a product, backward costs twice its forward: one for its input, one for its weight."""

RECOMPUTED = ("none", "attention", "layers", "everything")
"""Whose forward runs again: nothing's, the attention matrix's, whole layers', or the head's too."""


@attrs.frozen
class Scores:
    """The attention matrices of layers that are alike.

    Args:
        layers: how many there are.
        width: over all query heads, features of a query with a key and of a value, together.
        window: keys that a query sees at most; None: all.
    """

    layers: int
    width: int
    window: int | None = None

    def forward(self, sequence_length: float, *, causal: bool) -> float:
        """Return the forward FLOPs of a token, the mean over its places in the sequence.

        Args:
            sequence_length: tokens that attend to each other; of sequences that are not longer than
                the window, their mean over tokens, as in `Spans`.
            causal: whether only keys that a query can see count, half of the square.
        """
        seen = min(float(self.window or sequence_length), sequence_length)
        if causal:
            seen -= seen * seen / (2 * sequence_length)
        return 2.0 * self.layers * self.width * seen


@attrs.frozen
class Products:
    """What one token is multiplied with in a decoder, over all layers.

    Args:
        attention: weights of the query, key, value and output products.
        feed_forward: weights of the feed-forward products that a token meets: of experts, those
            that it is sent to.
        scores: the attention matrices.
        head: weights of the output head, whether or not they are the embedding's as well.
        table: weights of the embedding, where they are not the head's: 0 where the two are tied.
        router: weights of what chooses experts.
        vectors: weights of norms, biases and learned positions, which are in no product.
    """

    attention: int
    feed_forward: int
    scores: tuple[Scores, ...]
    head: int
    table: int = 0
    router: int = 0
    vectors: int = 0

    @property
    def active_parameters(self) -> int:
        """Weights that a token meets, each counted once."""
        layers = self.attention + self.feed_forward + self.router
        return layers + self.head + self.table + self.vectors

    @classmethod
    def of(cls, shape: ModelShape) -> Products:
        """Return those of a model of this package."""
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        matrices = 3 if shape.gated else 2
        dense, chosen, others, num_experts = shape.layers, 0, 0, 0
        if shape.experts is not None:
            dense = len(shape.dense_layers)
            routing, width = shape.experts.routing, shape.experts.width
            chosen = routing.top_k * width + (shape.experts.shared_width or 0)
            others = (routing.num_experts - routing.top_k) * width
            num_experts = routing.num_experts
        sparse, table = shape.layers - dense, shape.vocabulary * shape.width
        attention, scored = 2 * shape.width * (queries + keys), 2 * queries
        if shape.latent is not None:
            latent, heads = shape.latent, shape.heads
            norms = latent.keys + (latent.queries or 0)
            attention = latent.num_parameters(shape.width, heads, False) - norms
            scored = heads * (latent.key_width + latent.values)
        products = cls(
            attention=shape.layers * attention,
            feed_forward=shape.width * (dense * matrices * shape.mlp_width + sparse * 3 * chosen),
            scores=(Scores(shape.layers, scored, shape.window),),
            head=table,
            table=0 if shape.tied else table,
            router=sparse * num_experts * shape.width,
        )
        met = shape.num_parameters - sparse * 3 * shape.width * others
        return attrs.evolve(products, vectors=met - products.active_parameters)


def _one_of_recomputed(_: object, field: attrs.Attribute[str], value: str) -> None:
    if value not in RECOMPUTED:
        raise ConfigError(f"{field.name} must be one of {', '.join(RECOMPUTED)}, got {value!r}")


@attrs.frozen
class Convention:
    """What counts.

    Args:
        scores: whether products of queries, keys and values count.
        causal: whether of these only what a causal mask leaves counts, half of the square.
        head: whether the output head counts.
        router: whether what chooses experts counts.
        table: whether looking a token up counts like a product with the embedding, as it does
            where all parameters are multiplied by six.
        vectors: whether norms, biases and learned positions count like products, likewise.
        recomputed: whose forward counts once more: one of `RECOMPUTED`. With "none" these are
            *model* FLOPs, of MFU; otherwise *hardware* FLOPs, of HFU.
    """

    scores: bool = True
    causal: bool = True
    head: bool = True
    router: bool = False
    table: bool = False
    vectors: bool = False
    recomputed: str = attrs.field(default="none", validator=_one_of_recomputed)


MODEL = Convention()
"""Products of the mathematics, no more: what Megatron-Core reports since it halves attention."""

FULL_SQUARE = Convention(causal=False)
"""The same with the whole square of attention: 72 B s l h² (1 + s/6h + V/12lh) of a GPT."""

SC21 = Convention(causal=False, recomputed="layers")
"""Equation 3 of Megatron's paper: 96 B s l h² (1 + s/6h + V/16lh) of a GPT.

Source: Narayanan et al., arXiv:2104.04473, section 3.5.
"""

PALM = Convention(causal=False, router=True, table=True, vectors=True)
"""6 N + 12 L H Q T a token, N all parameters. Source: Chowdhery et al., arXiv:2204.02311, B."""

SIX_N = Convention(scores=False, router=True, table=True, vectors=True)
"""6 N a token. Source: Kaplan et al., arXiv:2001.08361, section 2.1."""

EIGHT_N = attrs.evolve(SIX_N, recomputed="everything")
"""8 N a token: 6 N and one more forward, where activations are recomputed."""


@attrs.frozen
class Spans:
    """The tokens of a step, and how many of them attend to each other.

    Args:
        tokens: how many, padding not among them.
        squares: the squared lengths of all documents, or of whole sequences where these are not
            cut into documents, added up.
    """

    tokens: int
    squares: int

    @property
    def mean(self) -> float:
        """The length of the document that a token is of, the mean over the tokens."""
        return self.squares / self.tokens if self.tokens else 0.0

    def flops(self, products: Products, convention: Convention = MODEL) -> float:
        """Return the FLOPs of training on these tokens."""
        if not self.tokens:
            return 0.0
        return self.tokens * flops_per_token(products, self.mean, convention)


def flops_per_token(
    products: Products, sequence_length: float, convention: Convention = MODEL
) -> float:
    """Return the FLOPs of training on one token: forward, backward, and what is recomputed.

    Those of a step are this times its tokens. A multiplication with its addition is two.

    Args:
        products: what a token is multiplied with; `Products.of` a shape.
        sequence_length: tokens that attend to each other.
        convention: what counts.
    """
    scores = 0.0
    if convention.scores:
        each = (s.forward(sequence_length, causal=convention.causal) for s in products.scores)
        scores = sum(each)
    layers = scores + 2.0 * (
        products.attention + products.feed_forward + products.router * convention.router
    )
    around = 2.0 * (
        products.head * convention.head
        + products.table * convention.table
        + products.vectors * convention.vectors
    )
    again = {"none": 0.0, "attention": scores, "layers": layers, "everything": layers + around}
    return (1.0 + BACKWARD) * (layers + around) + again[convention.recomputed]


def utilization(flops: float, seconds: float, peak_flops_per_s: float) -> float:
    """Return the share of the peak that was reached: MFU of model FLOPs, HFU of hardware FLOPs.

    Args:
        flops: done in that time by all devices.
        seconds: how long it took.
        peak_flops_per_s: of all devices together.
    """
    return flops / (seconds * peak_flops_per_s)
