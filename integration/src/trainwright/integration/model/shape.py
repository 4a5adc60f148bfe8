"""The sizes of a decoder, as a validated value."""

from __future__ import annotations

import difflib
import math

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.sharding.expert import Routing


@attrs.frozen
class ExpertShape:
    """The experts of a decoder whose feed-forward blocks are mixtures of experts.

    Args:
        routing: How tokens choose experts.
        width: hidden features of one expert.
        shared_width: hidden features of an expert that every token visits; None: there is none.
        balance: factor of the balance loss, to which a token adds 1 where experts are evenly used.
        z: factor of the squared log-sum-exp of a token's router logits.

    Raises:
        ConfigError: a width is not positive, or a factor is negative.
    """

    routing: Routing
    width: int
    shared_width: int | None = None
    balance: float = 0.01
    z: float = 0.001

    def __attrs_post_init__(self) -> None:
        for name in ("width", "shared_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"experts' {name} must be positive, got {value}")
        for name in ("balance", "z"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"experts' {name} must be finite and not negative, got {getattr(self, name)}"
                )


@attrs.frozen
class ModelShape:
    """The sizes of a Llama-style decoder-only language model.

    Args:
        vocabulary: number of token ids (256 for bytes).
        width: features of the residual stream.
        layers: number of decoder blocks.
        heads: query heads; they share ``width`` evenly.
        kv_heads: key/value heads; each serves ``heads / kv_heads`` query heads.
        mlp_width: hidden features of the SwiGLU block; without effect where there are experts.
        rope_base: base of the rotary frequencies.
        norm_epsilon: added to the mean square inside RMSNorm.
        tied: whether the output head is the embedding's weight.
        experts: what the feed-forward blocks are mixtures of; None where they are dense.

    Raises:
        ConfigError: a size is not positive, or one does not divide the other.
    """

    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    mlp_width: int = 384
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5
    tied: bool = False
    experts: ExpertShape | None = None

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if field.name not in ("tied", "experts") and value <= 0:
                raise ConfigError(f"model {field.name} must be positive, got {value}")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(
                f"model width={self.width} must be an even number of features for each of "
                f"heads={self.heads}; a multiple of {2 * self.heads} works"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model heads={self.heads} must be a multiple of kv_heads={self.kv_heads}"
            )

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads

    @property
    def num_parameters(self) -> int:
        """Number of weights; embedding and output head are one where they are tied."""
        attention = 2 * self.width * self.head_width * (self.heads + self.kv_heads)
        block = attention + self._feed_forward + 2 * self.width
        tables = 1 if self.tied else 2
        return self.layers * block + tables * self.vocabulary * self.width + self.width

    @property
    def _feed_forward(self) -> int:
        if self.experts is None:
            return 3 * self.width * self.mlp_width
        number = self.experts.routing.num_experts
        features = number * self.experts.width + (self.experts.shared_width or 0)
        return 3 * self.width * features + number * self.width


PRESETS = {
    "tiny": ModelShape(),
    "tiny-tied": ModelShape(tied=True),
    "tiny-moe": ModelShape(experts=ExpertShape(Routing(8, 2), width=128, shared_width=128)),
    "small": ModelShape(width=384, layers=8, heads=8, kv_heads=4, mlp_width=1024),
    "base": ModelShape(width=768, layers=12, heads=12, kv_heads=4, mlp_width=2048),
}
"""Named sizes that ``--model`` accepts: 0.8 (twice), 2.0, 13 and 76 million parameters."""


def preset(name: str) -> ModelShape:
    """Return the named sizes.

    Raises:
        ConfigError: the name is unknown; the nearest one is offered.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown model {name!r}; known: {', '.join(PRESETS)}{hint}")
    return PRESETS[name]
