"""The one place where two quantised operands are multiplied."""

# Shapes: N rows of the first operand, P rows of the second, K the dim that is summed over.

from __future__ import annotations

import torch

from trainwright.precision.errors import PrecisionError
from trainwright.precision.formats import E5M2, FP32, BlockQuantized

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FIRST_CAPABILITY = (8, 9)
_CUDA_MULTIPLE = 16


def scaled_product(
    first: BlockQuantized, second: BlockQuantized, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return ``first.dequantize() @ second.dequantize().T``, rounded once to ``dtype``.

    Terms are added in float32, or in float64 for a float64 result. `torch._scaled_mm` multiplies
    the codes where it takes them: operands with one scale, on a CPU also with one a row, and on
    CUDA devices of capability 8.9 where sizes are multiples of 16 and not both formats are E5M2.
    Everywhere else the same numbers are multiplied after decoding. Autocast has no say.

    Args:
        first: ``[N, K]``.
        second: ``[P, K]``.
        dtype: of the result.

    Raises:
        PrecisionError: the operands are no matrices with one K.
    """
    if first.codes.ndim != 2 or second.codes.ndim != 2 or _depth(first) != _depth(second):
        raise PrecisionError(
            f"operands are [N, K] and [P, K], got {list(first.codes.shape)} and "
            f"{list(second.codes.shape)}"
        )
    with torch.autocast(first.codes.device.type, enabled=False):
        if kernel_takes(first, second, dtype):
            return torch._scaled_mm(
                first.format.as_torch(first.codes.contiguous()),
                second.format.as_torch(second.codes.contiguous()).t(),
                *_kernel_scales(first, second),
                out_dtype=dtype,
            )
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        return (first.dequantize(wide) @ second.dequantize(wide).t()).to(dtype)


def kernel_takes(first: BlockQuantized, second: BlockQuantized, dtype: torch.dtype) -> bool:
    """Say whether `torch._scaled_mm` multiplies these operands."""
    layouts = _has_one_scale(first), _has_one_scale(second)
    per_row = _has_row_scales(first) and _has_row_scales(second)
    device = first.codes.device
    if dtype not in _KERNEL_DTYPES or min(*first.codes.shape, *second.codes.shape) == 0:
        return False
    if device.type == "cpu":
        return all(layouts) or per_row
    if device.type != "cuda" or torch.version.hip is not None or not all(layouts):
        return False
    sizes = (_depth(first), second.codes.shape[0])
    return (
        torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
        and all(size % _CUDA_MULTIPLE == 0 for size in sizes)
        and not (first.format is E5M2 and second.format is E5M2)
    )


def _depth(operand: BlockQuantized) -> int:
    return operand.codes.shape[1]


def _has_one_scale(operand: BlockQuantized) -> bool:
    return operand.scale_format is FP32 and operand.scales.numel() == 1


def _has_row_scales(operand: BlockQuantized) -> bool:
    is_one_block = operand.block[0] == 1 and operand.block[1] >= _depth(operand)
    return operand.scale_format is FP32 and is_one_block


def _kernel_scales(
    first: BlockQuantized, second: BlockQuantized
) -> tuple[torch.Tensor, torch.Tensor]:
    scales = first.scale_values().float(), second.scale_values().float()
    if _has_one_scale(first) and _has_one_scale(second):
        return scales[0].reshape(()), scales[1].reshape(())
    return scales[0].contiguous(), scales[1].t().contiguous()
