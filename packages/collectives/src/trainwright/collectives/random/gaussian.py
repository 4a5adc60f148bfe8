"""The Box-Muller transform from correctly rounded operations only.

``torch.log`` and ``torch.cos`` promise no rounding: their last bits may differ between devices,
processors and mathematical libraries. Sums, products, quotients and roots are exact to the last bit
(IEEE 754), so what is made of them is the same everywhere. Each product and sum is a call of its
own: a fused multiply-add would round differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_FRACTION = 2**52 - 1
_EXPONENT_OF_ONE = 1023
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
# Minimax polynomials of FreeBSD's msun (e_log.c, k_sin.c, k_cos.c).
_LOG = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
_SIN = (
    -1.66666666666666324348e-01,
    8.33333333332248946124e-03,
    -1.98412698298579493134e-04,
    2.75573137070700676789e-06,
    -2.50507602534068634195e-08,
    1.58969099521155010221e-10,
)
_COS = (
    4.16666666666666019037e-02,
    -1.38888888888741095749e-03,
    2.48015872894767294178e-05,
    -2.75573143513906633035e-07,
    2.08757232129817482790e-09,
    -1.13596475577881948265e-11,
)


def transform_pair(bits0: torch.Tensor, bits1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two independent normal float64 numbers for each pair of 53-bit integers.

    Source:
        Box, Muller: A note on the generation of random normal deviates (1958).
    """
    # 1 - u is in (0, 1], so that the logarithm is finite.
    radius = log_unit((2**53 - bits0).double().mul_(2.0**-53)).mul_(-2.0).sqrt_()
    cos, sin = cos_sin_turns(bits1)
    return cos.mul_(radius), sin.mul_(radius)


def log_unit(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of positive, normal float64 numbers, to 1 ulp."""
    raw = x.contiguous().view(torch.int64)
    mantissa = (raw & _FRACTION).bitwise_or_(_EXPONENT_OF_ONE << 52).view(torch.float64)
    large = mantissa > math.sqrt(2.0)
    exponent = (raw >> 52).sub_(_EXPONENT_OF_ONE).add_(large).double()
    f = torch.where(large, mantissa * 0.5, mantissa).sub_(1.0)
    s = f / (f + 2.0)
    z = s * s
    half_square = (f * f).mul_(0.5)
    tail = _polynomial(z, _LOG).mul_(z).add_(half_square).mul_(s)
    tail.add_(exponent * _LN2_LOW)
    return exponent.mul_(_LN2_HIGH).sub_(half_square.sub_(tail).sub_(f))


def cos_sin_turns(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of ``bits * 2**-53`` turns, to about 1 ulp."""
    quarter = (bits + 2**50) >> 51
    angle = (bits - (quarter << 51)).double().mul_(2.0**-51).mul_(math.pi / 2)
    z = angle * angle
    sin = _polynomial(z, _SIN).mul_(z).mul_(angle).add_(angle)
    cos = _polynomial(z, _COS).mul_(z).mul_(z).sub_(z * 0.5).add_(1.0)
    odd = (quarter & 1).bool()
    cos_sign = 1 - (quarter + 1).bitwise_and_(2)
    sin_sign = 1 - (quarter & 2)
    return (
        torch.where(odd, sin, cos).mul_(cos_sign),
        torch.where(odd, cos, sin).mul_(sin_sign),
    )


def _polynomial(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    value = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        value.add_(coefficient).mul_(x)
    return value.add_(coefficients[0])
