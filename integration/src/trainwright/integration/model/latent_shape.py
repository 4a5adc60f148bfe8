"""The sizes of multi-head latent attention, as a validated value."""

from __future__ import annotations

import attrs

from trainwright.integration.errors import ConfigError


@attrs.frozen
class LatentShape:
    """The sizes of attention whose keys and values are made of a small shared vector.

    Args:
        keys: features of that vector.
        plain: features of a query or key that are not turned by its position.
        turned: features that are.
        values: features of a value.
        queries: features of the vector that queries are made of; None: of the stream itself.
        interleaved: whether neighbours are turned together, not one half with the other.
        norm_epsilon: added to the mean square in the norms of these vectors.
        score_weight: how much stretched rotary positions sharpen the scores: the weight in
            `yarn_magnitude`, whose square multiplies them; 0: not at all.
        score_factor: that square.

    Raises:
        ConfigError: A size is not positive, or ``turned`` odd.
    """

    keys: int
    plain: int
    turned: int
    values: int
    queries: int | None = None
    interleaved: bool = True
    norm_epsilon: float = 1e-6
    score_weight: float = 0.0
    score_factor: float = 1.0

    def __attrs_post_init__(self) -> None:
        for name in ("keys", "plain", "turned", "values", "queries"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"latent attention: {name} must be positive, got {value}")
        if self.turned % 2:
            raise ConfigError(f"latent attention: turned must be even, got {self.turned}")

    @property
    def key_width(self) -> int:
        """Features of a query or key."""
        return self.plain + self.turned

    @property
    def kernel_width(self) -> int:
        """Features that a fused kernel is given of queries, keys and values alike."""
        return max(self.key_width, self.values)

    def num_parameters(self, width: int, heads: int, bias: bool) -> int:
        """Return the number of weights, but for the output's bias."""
        asking = width if self.queries is None else self.queries
        weights = asking * heads * self.key_width
        if self.queries is not None:
            weights += (width + 1 + bias) * self.queries
        weights += width * (self.keys + self.turned) + bias * (self.keys + self.turned)
        weights += self.keys + self.keys * heads * (self.plain + self.values)
        return weights + heads * self.values * width
