"""The sizes of a decoder, as a validated value."""

from __future__ import annotations

import difflib

import attrs

from trainwright.integration.errors import ConfigError


@attrs.frozen
class ModelShape:
    """The sizes of a Llama-style decoder-only language model.

    Args:
        vocabulary: number of token ids (256 for bytes).
        width: features of the residual stream.
        layers: number of decoder blocks.
        heads: query heads; they share ``width`` evenly.
        kv_heads: key/value heads; each serves ``heads / kv_heads`` query heads.
        mlp_width: hidden features of the SwiGLU block.
        rope_base: base of the rotary frequencies.
        norm_epsilon: added to the mean square inside RMSNorm.
        tied: whether the output head is the embedding's weight.

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

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if value <= 0 and field.name != "tied":
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
        block = attention + 3 * self.width * self.mlp_width + 2 * self.width
        tables = 1 if self.tied else 2
        return self.layers * block + tables * self.vocabulary * self.width + self.width


PRESETS = {
    "tiny": ModelShape(),
    "tiny-tied": ModelShape(tied=True),
    "small": ModelShape(width=384, layers=8, heads=8, kv_heads=4, mlp_width=1024),
    "base": ModelShape(width=768, layers=12, heads=12, kv_heads=4, mlp_width=2048),
}
"""Named sizes that ``--model`` accepts: about 0.8 (twice), 13 and 78 million parameters."""


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
