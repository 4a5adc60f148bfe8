"""What a rank of a training run holds in memory, without building anything."""

from trainwright.sharding.memory.conventions import (
    GIB,
    GptActivations,
    deepspeed_zero2_bytes,
    deepspeed_zero3_bytes,
    gpt_parameters,
    megatron_bytes,
    zero_bytes,
    zero_largest_model,
)
from trainwright.sharding.memory.conventions_bridge import BridgeEstimate
from trainwright.sharding.memory.parameters import Held, Slice, parameters_of, slices_of
from trainwright.sharding.memory.shape import ExpertSizes, LatentSizes, TransformerShape
from trainwright.sharding.memory.states import BucketStates, BytesPerParameter, Sharing, buckets_of

__all__ = [
    "GIB",
    "BridgeEstimate",
    "BucketStates",
    "BytesPerParameter",
    "ExpertSizes",
    "GptActivations",
    "Held",
    "LatentSizes",
    "Sharing",
    "Slice",
    "TransformerShape",
    "buckets_of",
    "deepspeed_zero2_bytes",
    "deepspeed_zero3_bytes",
    "gpt_parameters",
    "megatron_bytes",
    "parameters_of",
    "slices_of",
    "zero_bytes",
    "zero_largest_model",
]
