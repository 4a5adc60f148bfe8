"""The formats that training uses."""

from __future__ import annotations

import torch

from .number_format import NumberFormat, Specials

FP32 = NumberFormat("FP32", 8, 23, 127, Specials.IEEE, dtype=torch.float32)
FP16 = NumberFormat("FP16", 5, 10, 15, Specials.IEEE, dtype=torch.float16)
BF16 = NumberFormat("BF16", 8, 7, 127, Specials.IEEE, dtype=torch.bfloat16)
E4M3 = NumberFormat("E4M3", 4, 3, 7, Specials.ALL_ONES, dtype=torch.float8_e4m3fn)
E5M2 = NumberFormat("E5M2", 5, 2, 15, Specials.IEEE, dtype=torch.float8_e5m2)
E4M3FNUZ = NumberFormat("E4M3FNUZ", 4, 3, 8, Specials.NEGATIVE_ZERO, dtype=torch.float8_e4m3fnuz)
E5M2FNUZ = NumberFormat("E5M2FNUZ", 5, 2, 16, Specials.NEGATIVE_ZERO, dtype=torch.float8_e5m2fnuz)
E3M2 = NumberFormat("E3M2", 3, 2, 3, Specials.NONE)
E2M3 = NumberFormat("E2M3", 2, 3, 1, Specials.NONE)
E2M1 = NumberFormat("E2M1", 2, 1, 1, Specials.NONE, dtype=torch.float4_e2m1fn_x2)
E8M0 = NumberFormat("E8M0", 8, 0, 127, Specials.ALL_ONES, signed=False, dtype=torch.float8_e8m0fnu)

FORMATS = (FP32, FP16, BF16, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E3M2, E2M3, E2M1, E8M0)
"""All of them."""
