"""The sizes of a decoder and the parts that it is made of, as a validated value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Literal, get_args

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.integration.model.latent_shape import LatentShape
from trainwright.integration.model.rotary import RopeScaling
from trainwright.sharding.expert import Routing

Norm = Literal["rms", "layer"]
Positions = Literal["rotary", "learned"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
CHOICES = {"norm": get_args(Norm), "positions": get_args(Positions)}


@attrs.frozen
class ExpertShape:
    """The experts of a decoder whose feed-forward blocks are mixtures of experts.

    Args:
        routing: How tokens choose experts.
        width: hidden features of one expert.
        shared_width: hidden features of an expert that every token visits; None: there is none.
        balance: factor of the balance loss, to which a token adds 1 where experts are evenly used.
        z: factor of the squared log-sum-exp of a token's router logits.
        shared_gate: whether the shared expert's output is multiplied by a sigmoid of its own.

    Raises:
        ConfigError: a width is not positive, a factor is negative, or a gate has nothing to gate.
    """

    routing: Routing
    width: int
    shared_width: int | None = None
    balance: float = 0.01
    z: float = 0.001
    shared_gate: bool = False

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
        if self.shared_gate and self.shared_width is None:
            raise ConfigError("experts' shared_gate needs a shared expert: give a shared_width")

    def num_parameters(self, width: int) -> int:
        """Return the number of weights of one block's experts and router."""
        number = self.routing.num_experts
        features = number * self.width + (self.shared_width or 0)
        return 3 * width * features + number * width + self.shared_gate * width


def _to_numbers(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))


MAX_LAYERS = 100_000
"""More are a mistake in a file, whose modules would be built without end."""


@attrs.frozen
class ModelShape:
    """The sizes of a decoder-only language model, and what its blocks are made of.

    Args:
        vocabulary: number of token ids (256 for bytes).
        width: features of the residual stream.
        layers: number of decoder blocks.
        heads: query heads.
        kv_heads: key/value heads; each serves ``heads / kv_heads`` query heads.
        mlp_width: hidden features of a dense feed-forward block.
        rope_base: base of the rotary frequencies.
        norm_epsilon: added to the mean square inside norms.
        tied: whether the output head is the embedding's weight.
        experts: what the feed-forward blocks are mixtures of; None where they are dense.
        head_features: of one attention head; None: ``width / heads``.
        rope_scaling: what stretches the rotary frequencies.
        norm: "rms" or "layer", which has biases.
        positions: "rotary", or "learned": a table whose vectors are added to the embedding's.
        max_positions: rows of that table; with rotary positions what the model was trained for,
            which nothing is computed from.
        activation: of the feed-forward blocks: silu, gelu, gelu_tanh or relu.
        gated: whether these multiply an activated product by another one.
        qkv_bias: whether queries, keys and values have biases.
        output_bias: whether the output of attention has one.
        mlp_bias: whether the products of dense feed-forward blocks have.
        qk_norm: whether queries and keys are normalised head by head, before they are turned.
        window: how many positions up to its own one sees; None: all. Sequences up to the window
            are computed, longer ones refused.
        dense_layers: numbers of the blocks without experts, where the others have some.
        latent: sizes of latent attention; None: keys and values are made of the stream itself.
        z_loss: in training each token's loss has this times the square of the log of the softmax's
            normaliser; None: nothing.
        embedding_gradient: share of the gradient of the embedding's output that flows back into
            the embedding; None: all of it.

    Raises:
        ConfigError: a size is not positive, one does not divide the other, or two contradict.
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
    head_features: int | None = None
    rope_scaling: RopeScaling | None = None
    norm: Norm = "rms"
    positions: Positions = "rotary"
    max_positions: int | None = None
    activation: Activation = "silu"
    gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    dense_layers: tuple[int, ...] = attrs.field(default=(), converter=_to_numbers)
    latent: LatentShape | None = None
    z_loss: float | None = None
    embedding_gradient: float | None = None

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if type(value) in (int, float) and value <= 0:
                raise ConfigError(f"model {field.name} must be positive, got {value}")
        if self.layers > MAX_LAYERS:
            raise ConfigError(f"model layers must be at most {MAX_LAYERS:,}, got {self.layers:,}")
        self._check_heads()
        self._check_parts()

    def _check_heads(self) -> None:
        if self.latent is not None:
            if self.kv_heads != self.heads or self.qk_norm or self.positions != "rotary":
                raise ConfigError(
                    f"model latent attention has rotary positions, as many kv_heads as heads="
                    f"{self.heads}, and no qk_norm"
                )
            return
        if self.head_features is None and self.width % self.heads:
            raise ConfigError(
                f"model width={self.width} must be an even number of features for each of "
                f"heads={self.heads}; a multiple of {2 * self.heads} works, or head_features"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ConfigError(
                f"model width={self.width} must be an even number of features for each of "
                f"heads={self.heads}; a multiple of {2 * self.heads} works, or an even "
                "head_features"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model heads={self.heads} must be a multiple of kv_heads={self.kv_heads}"
            )

    def _check_parts(self) -> None:
        known = {**CHOICES, "activation": get_args(Activation)}
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"model {name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        if self.positions == "learned" and self.max_positions is None:
            raise ConfigError(
                "model positions=learned needs max_positions, the rows of their table"
            )
        if self.positions == "learned" and self.rope_scaling is not None:
            raise ConfigError("model positions=learned are not rotary: leave out rope_scaling")
        if self.dense_layers and (self.experts is None or self.dense_layers[-1] >= self.layers):
            raise ConfigError(
                f"model dense_layers={self.dense_layers} are blocks without experts where others "
                f"of the {self.layers} have some"
            )
        if self.dense_layers and len(self.dense_layers) == self.layers:
            raise ConfigError("model dense_layers are all blocks: leave out the experts instead")

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.head_features or self.width // self.heads

    @property
    def turned_width(self) -> int:
        """Features of a query or key that its position turns."""
        return self.head_width if self.latent is None else self.latent.turned

    @property
    def num_parameters(self) -> int:
        """Number of weights; embedding and output head are one where they are tied."""
        norm = self.width * (1 if self.norm == "rms" else 2)
        dense = len(self.dense_layers) if self.experts is not None else self.layers
        sparse = self.layers - dense
        mixed = 0 if self.experts is None else sparse * self.experts.num_parameters(self.width)
        blocks = self.layers * (self._attention + 2 * norm) + dense * self._dense + mixed
        tables = (1 if self.tied else 2) * self.vocabulary
        if self.positions == "learned":
            tables += self.max_positions or 0
        return blocks + tables * self.width + norm

    @property
    def _attention(self) -> int:
        if self.latent is not None:
            made = self.latent.num_parameters(self.width, self.heads, self.qkv_bias)
            return made + self.output_bias * self.width
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        weights = 2 * self.width * (queries + keys)
        weights += self.qkv_bias * (queries + 2 * keys) + self.output_bias * self.width
        return weights + 2 * self.qk_norm * self.head_width

    @property
    def _dense(self) -> int:
        entering = 2 if self.gated else 1
        weights = (entering + 1) * self.width * self.mlp_width
        return weights + self.mlp_bias * (entering * self.mlp_width + self.width)


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
        raise ConfigError(
            f"unknown model {name!r}: no folder, and none of {', '.join(PRESETS)}{hint}"
        )
    return PRESETS[name]
