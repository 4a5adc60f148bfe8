"""How model states are spread over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import attrs
import torch
from torch import nn

from trainwright.sharding.data.units import UnitRule
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.protocol import WeightCodec

MASTER_DTYPES = (torch.float32, torch.float64)
WEIGHT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@attrs.frozen
class ShardPolicy:
    """Which model states a rank keeps whole, and in which dtypes.

    Args:
        stage: 0 keeps everything on every rank; 1 cuts the optimizer's weights and states over the
            data-parallel ranks, 2 also the gradients, 3 also the weights.
        bucket_bytes: Gradients are reduced in buckets of at most this many bytes; a larger
            parameter is a bucket of its own. At stage 3 a unit's group is always one bucket.
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
        units: Chooses the modules whose parameters are gathered and reduced together; None makes
            the model one unit.
        missing_gradients: What a parameter is that got no gradient in a step: "zero" lets it
            contribute zeros; "error" raises on every rank, naming parameters and ranks, before
            anything is reduced, and so gives up reducing during the backward.
        release_after_forward: Stage 3: free a unit's weights after its forward and gather them
            again for its backward. False keeps them until its backward is over.
        live_units: Stage 3: most units whose weights are whole at once because they are computed
            or gathered ahead; units that enclose them come on top.
        reduce_each_backward: Stages 2 and 3: reduce after every backward into the range that a
            rank keeps, for a reduction a backward. Between backwards gradients then take 1/N.
            False reduces once a step.
        weight_codec: Stage 3: gives what a parameter's weights travel by from its name and the
            parameter, None for those that travel as they are. The module then computes with what
            was decoded; masters, and what a rank keeps, stay exact. Where there is nobody to
            gather from, weights stay as they are.

    Raises:
        ShardingError: A value is out of range, or two contradict each other.
    """

    stage: int = 0
    bucket_bytes: int = 25 * 2**20
    master_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    parameter_dtype: Callable[[str, nn.Parameter], torch.dtype] | None = None
    alignment: int = 32
    broadcast_weights: bool = True
    units: UnitRule | None = None
    missing_gradients: Literal["zero", "error"] = "zero"
    release_after_forward: bool = True
    live_units: int = 2
    reduce_each_backward: bool = False
    weight_codec: Callable[[str, nn.Parameter], WeightCodec | None] | None = None

    def __attrs_post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
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
        if self.weight_codec is not None and self.stage < 3:
            raise ShardingError(
                f"weight_codec has no effect at stage {self.stage}, where weights stay whole; "
                "leave it out, or choose stage 3"
            )
        self._check_accumulation()
        if self.live_units < 1:
            raise ShardingError(f"live_units must be at least 1, got {self.live_units}")
        if not self.release_after_forward and self.stage < 3:
            raise ShardingError(
                "release_after_forward=False has no effect at stage "
                f"{self.stage}, where weights stay whole; leave it out, or choose stage 3"
            )

    def _check_accumulation(self) -> None:
        if self.missing_gradients not in ("zero", "error"):
            raise ShardingError(
                f"missing_gradients must be 'zero' or 'error', got {self.missing_gradients!r}"
            )
        if not self.reduce_each_backward:
            return
        if self.stage < 2:
            raise ShardingError(
                "reduce_each_backward needs stage 2 or 3: gradients are whole while they "
                f"accumulate at stage {self.stage}"
            )
        if self.missing_gradients == "error":
            raise ShardingError(
                "reduce_each_backward cannot go with missing_gradients='error': a parameter may "
                "get its gradient in a later backward, when earlier ones are reduced already"
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
