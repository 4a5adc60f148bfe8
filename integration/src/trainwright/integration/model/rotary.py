"""Rotary positions: their frequencies, how published models stretch them, and the turn itself."""

# Shapes: B batch, S sequence, H heads, E features of a head that are turned.

from __future__ import annotations

import math
from typing import Protocol

import attrs
import torch

from trainwright.integration.errors import ConfigError


class RopeScaling(Protocol):
    """Makes the frequencies of a model that was stretched to longer sequences.

    Laws: a value is compared by its numbers; what it returns depends on nothing else.
    """

    @property
    def magnitude(self) -> float:
        """What cosine and sine are multiplied with."""
        ...

    def stretch(self, frequencies_F: torch.Tensor, base: float) -> torch.Tensor:
        """Return the frequencies in radians a position, float64 [E / 2], given the plain ones."""
        ...


def _positive(_: object, field: attrs.Attribute[float], value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"rope scaling: {field.name} must be finite and positive, got {value}")


@attrs.frozen
class LinearScaling:
    """Positions divided by a factor.

    Source: Chen et al., Extending Context Window of Large Language Models (2023), section 2.3.
    """

    factor: float = attrs.field(converter=float, validator=_positive)

    @property
    def magnitude(self) -> float:
        """Always 1."""
        return 1.0

    def stretch(self, frequencies_F: torch.Tensor, base: float) -> torch.Tensor:
        """Return the frequencies divided by the factor."""
        return frequencies_F / self.factor


@attrs.frozen
class Llama3Scaling:
    """Long waves are stretched, short ones kept, and those in between blended, as in Llama 3.1.

    Args:
        factor: What long waves are stretched by.
        low: Waves that fit less often than this into ``original`` positions are long.
        high: Waves that fit more often are short.
        original: Positions of the sequences that the model was first trained on.

    Raises:
        ConfigError: A number is not positive, or ``low`` not below ``high``.

    Source: Llama team, The Llama 3 Herd of Models (2024), section 3.4.2, and its published code.
    """

    factor: float = attrs.field(converter=float, validator=_positive)
    low: float = attrs.field(converter=float, validator=_positive)
    high: float = attrs.field(converter=float, validator=_positive)
    original: float = attrs.field(converter=float, validator=_positive)

    def __attrs_post_init__(self) -> None:
        if self.low >= self.high:
            raise ConfigError(
                f"rope scaling: low={self.low} must be below high={self.high}: waves between them "
                "are blended"
            )

    @property
    def magnitude(self) -> float:
        """Always 1."""
        return 1.0

    def stretch(self, frequencies_F: torch.Tensor, base: float) -> torch.Tensor:
        """Return the frequencies, each between its own and a factor less."""
        fits_F = self.original * frequencies_F / (2 * math.pi)
        kept_F = ((fits_F - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies_F * (kept_F + (1 - kept_F) / self.factor)


@attrs.frozen
class YarnScaling:
    """Features are stretched by how often their wave fits into the original sequence: YaRN.

    Args:
        factor: What long waves are stretched by.
        original: Positions of the sequences that the model was first trained on.
        fast: Waves that fit more often are kept.
        slow: Waves that fit less often are stretched whole.
        magnitude: What cosine and sine are multiplied with; `yarn_magnitude` is the paper's.
        truncate: Whether the blend begins and ends at whole features.

    Raises:
        ConfigError: A number is not positive.

    Source: Peng et al., YaRN (2023), sections 3.2 to 3.4.
    """

    factor: float = attrs.field(converter=float, validator=_positive)
    original: float = attrs.field(converter=float, validator=_positive)
    fast: float = attrs.field(default=32.0, validator=_positive)
    slow: float = attrs.field(default=1.0, validator=_positive)
    magnitude: float = attrs.field(default=1.0, validator=_positive)
    truncate: bool = True

    def stretch(self, frequencies_F: torch.Tensor, base: float) -> torch.Tensor:
        """Return the frequencies, each between its own and a factor less."""
        number = len(frequencies_F)
        first, last = (self._feature(fits, 2 * number, base) for fits in (self.fast, self.slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * number - 1)
        width = last - first or 0.001
        places_F = torch.arange(number, dtype=torch.float64, device=frequencies_F.device)
        stretched_F = ((places_F - first) / width).clamp(0, 1)
        return frequencies_F * ((1 - stretched_F) + stretched_F / self.factor)

    def _feature(self, fits: float, width: int, base: float) -> float:
        """Return at which feature a wave fits so often into the original sequence."""
        return width * math.log(self.original / (fits * 2 * math.pi)) / (2 * math.log(base))


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return what keeps the entropy of attention over a sequence ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rotary_angles(
    positions: torch.Tensor,
    head_width: int,
    base: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of the rotary angles, in at least float32.

    Angles are computed in float64: at position 2,000 a half-precision angle is off by a radian.

    Args:
        positions: Integers, [S] alike in all sequences, or [B, S].
        head_width: E.
        base: Of the frequencies.
        dtype: That of the stream.
        scaling: Of the frequencies; None: as they are.

    Returns:
        [S, E], or [B, 1, S, E], which meets the heads of each sequence.

    Source: Su et al., RoFormer, section 3.4.2, in the half-split order of Llama's weights.
    """
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64, device=positions.device)
    frequencies = torch.pow(base, -exponents / head_width)
    if scaling is not None:
        frequencies = scaling.stretch(frequencies, base)
    angles = positions.to(torch.float64)[..., None] * frequencies
    angles = torch.cat((angles, angles), -1)
    if positions.ndim > 1:
        angles = angles.unsqueeze(1)
    factor = 1.0 if scaling is None else scaling.magnitude
    kept = dtype if dtype == torch.float64 else torch.float32
    return (angles.cos() * factor).to(kept), (angles.sin() * factor).to(kept)


def turn(x_BHSE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return queries or keys turned by the angles of their positions, in their own dtype."""
    exact = x_BHSE.to(cos.dtype)
    first, second = exact.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (exact * cos + turned * sin).to(x_BHSE.dtype)
