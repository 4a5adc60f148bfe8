"""How model states are spread over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import nn

from trainwright.sharding.errors import NotAvailableError, ShardingError

MASTER_DTYPES = (torch.float32, torch.float64)
WEIGHT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@attrs.frozen
class ShardPolicy:
    """Which model states a rank keeps whole, and in which dtypes.

    Args:
        stage: 0 keeps everything on every rank; 1 cuts the optimizer's weights and states over the
            data-parallel ranks. 2 (gradients) and 3 (weights) are not available yet.
        bucket_bytes: Gradients are reduced in buckets of at most this many bytes; a larger
            parameter is a bucket of its own.
        master_dtype: Dtype of gradients, of the weights the optimizer updates and so of its states:
            float32 or float64. A float64 parameter has float64 masters whatever stands here.
        reduce_dtype: Dtype in which float32 gradients travel; None sends them as they are. float64
            gradients are never lowered.
        parameter_dtype: Gives the dtype that the module's own weights have from its name and the
            parameter; None leaves each as it is. Masters start from the weights as they were
            before.
        alignment: Every parameter, and every rank's range of a bucket, starts at a multiple of this
            many elements; the padding between is zero.
        broadcast_weights: Start from the weights of the first rank wherever a weight is replicated.
            False leaves each rank's weights as they are: they must be equal already.

    Raises:
        ShardingError: A value is out of range.
        NotAvailableError: ``stage`` is 2 or 3.
    """

    stage: int = 0
    bucket_bytes: int = 25 * 2**20
    master_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    parameter_dtype: Callable[[str, nn.Parameter], torch.dtype] | None = None
    alignment: int = 32
    broadcast_weights: bool = True

    def __attrs_post_init__(self) -> None:
        if self.stage in (2, 3):
            raise NotAvailableError(f"stage {self.stage} is not available yet; 0 and 1 are")
        if self.stage not in (0, 1):
            raise ShardingError(f"stage must be 0, 1, 2 or 3, got {self.stage!r}")
        if self.bucket_bytes < 1:
            raise ShardingError(f"bucket_bytes must be at least 1, got {self.bucket_bytes}")
        if self.alignment < 1:
            raise ShardingError(f"alignment must be at least 1 element, got {self.alignment}")
        if self.master_dtype not in MASTER_DTYPES:
            raise ShardingError(
                f"master_dtype must be float32 or float64, got {self.master_dtype}; gradients are "
                "summed and weights updated in it"
            )
        if self.reduce_dtype is not None and self.reduce_dtype not in WEIGHT_DTYPES:
            raise ShardingError(
                f"reduce_dtype must be None or one of {', '.join(map(str, WEIGHT_DTYPES))}, "
                f"got {self.reduce_dtype}"
            )

    def master_dtype_of(self, *held: torch.dtype) -> torch.dtype:
        """Return the dtype of masters of a parameter that was and is held in these dtypes."""
        widest = self.master_dtype
        for dtype in held:
            widest = torch.promote_types(widest, dtype)
        return widest

    def wire_dtype_of(self, gradient_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a dtype travel; float64 is never lowered."""
        if self.reduce_dtype is None or gradient_dtype == torch.float64:
            return gradient_dtype
        return self.reduce_dtype
