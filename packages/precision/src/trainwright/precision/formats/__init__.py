"""Number formats as values: code points, encoding and decoding, rounding, scales, blocks."""

from trainwright.precision.formats.blocks import BlockQuantized
from trainwright.precision.formats.named import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    FP16,
    FP32,
)
from trainwright.precision.formats.number_format import (
    NumberFormat,
    Specials,
)
from trainwright.precision.formats.nvfp4 import quantize_nvfp4
from trainwright.precision.formats.quantization import (
    encode_scaled,
    quantize_blockwise,
    quantize_mx,
)
from trainwright.precision.formats.rounding import (
    Rounding,
    Stochastic,
    by_draws,
    nearest_even,
    toward_zero,
)
from trainwright.precision.formats.scales import (
    ExponentRule,
    amax,
    ceil_exponent,
    floor_exponent,
    scale_from_amax,
)

__all__ = [
    "BF16",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "E8M0",
    "FORMATS",
    "FP16",
    "FP32",
    "BlockQuantized",
    "ExponentRule",
    "NumberFormat",
    "Rounding",
    "Specials",
    "Stochastic",
    "amax",
    "by_draws",
    "ceil_exponent",
    "encode_scaled",
    "floor_exponent",
    "nearest_even",
    "quantize_blockwise",
    "quantize_mx",
    "quantize_nvfp4",
    "scale_from_amax",
    "toward_zero",
]
