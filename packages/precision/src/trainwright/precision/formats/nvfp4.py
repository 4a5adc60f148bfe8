"""FP4 in blocks of 16 with FP8 scales, below one scale of the whole tensor."""

from __future__ import annotations

import torch

from trainwright.precision.errors import PrecisionError

from .blocks import BlockQuantized, as_block
from .named import E2M1, E4M3
from .quantization import encode_blocks
from .rounding import Rounding, nearest_even
from .scales import amax, is_amax

_SMALLEST_CODE = 1
_LARGEST_SCALE = 2.0**116


def quantize_nvfp4(
    tensor: torch.Tensor,
    block: int | tuple[int, int] = 16,
    *,
    largest: torch.Tensor | None = None,
    rounding: Rounding = nearest_even,
) -> BlockQuantized:
    """Return E2M1 codes with an E4M3 scale a block, and the tensor's own scale.

    The tensor's scale maps its largest magnitude onto that of E4M3 times that of E2M1, so that the
    blocks' scales fit E4M3. A block's scale is rounded to E4M3; where that made it smaller, what is
    then too large becomes the largest number. A zero block has E4M3's smallest positive number as
    its scale. A block that holds NaN or infinity comes back as NaN, and so does the whole tensor
    where ``largest`` is not finite. Blocks at the end of a dim may be smaller.

    Args:
        tensor: floating-point, at least one dim.
        block: 16 columns, or (16, 16) as usual for weights.
        largest: the largest magnitude of the whole tensor, one number, where ``tensor`` is a
            shard of it; None: of ``tensor``, which is then read twice.
        rounding: as in `NumberFormat.encode`; a `Stochastic` for gradients.

    Raises:
        PrecisionError: the tensor or block cannot be that.

    Source:
        NVIDIA, Pretraining large language models with NVFP4 (2025), appendix B.
    """
    pair = as_block(block)
    whole = amax(tensor) if largest is None else largest.detach()
    if whole.numel() != 1 or whole.dtype not in (torch.float32, torch.float64):
        raise PrecisionError(
            f"the largest magnitude of a tensor is one float32 or float64 number, got "
            f"{whole.dtype} of shape {list(whole.shape)}; reduce amax() of all shards by MAX"
        )
    # Small enough to be divided by the smallest scale of a block.
    encode_scale = (E4M3.max * E2M1.max / whole.view(())).clamp_(max=_LARGEST_SCALE)
    encode_scale.masked_fill_(whole.view(()) == 0, 1.0)

    def multipliers(largest: torch.Tensor) -> torch.Tensor:
        codes = E4M3.encode_clamped(largest / E2M1.max * encode_scale).clamp_min_(_SMALLEST_CODE)
        scale = encode_scale.to(largest.dtype) / E4M3.decode(codes)
        return scale.masked_fill_(~is_amax(largest), torch.nan)

    codes, found = encode_blocks(tensor, pair, E2M1, multipliers, rounding)
    scales = E4M3.encode_clamped(encode_scale / found)
    return BlockQuantized(codes, scales, E2M1, pair, E4M3, encode_scale.reciprocal())
