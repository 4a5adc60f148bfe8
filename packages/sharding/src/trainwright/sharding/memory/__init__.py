"""What a rank of a training run holds in memory, without building anything."""

from trainwright.sharding.memory.activations import decoder_bytes
from trainwright.sharding.memory.away import Away
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
from trainwright.sharding.memory.estimate import memory
from trainwright.sharding.memory.kept_bytes import BlockBytes, KeptBytes, Tokens
from trainwright.sharding.memory.parameters import Held, Slice, parameters_of, slices_of
from trainwright.sharding.memory.picture import memory_svg
from trainwright.sharding.memory.rank_memory import (
    KINDS,
    Chunk,
    InFlight,
    RankMemory,
    Traffic,
)
from trainwright.sharding.memory.shape import ExpertSizes, LatentSizes, TransformerShape
from trainwright.sharding.memory.states import BucketStates, BytesPerParameter, Sharing, buckets_of
from trainwright.sharding.memory.table import memory_table

__all__ = [
    "GIB",
    "KINDS",
    "Away",
    "BlockBytes",
    "BridgeEstimate",
    "BucketStates",
    "BytesPerParameter",
    "Chunk",
    "ExpertSizes",
    "GptActivations",
    "Held",
    "InFlight",
    "KeptBytes",
    "LatentSizes",
    "RankMemory",
    "Sharing",
    "Slice",
    "Tokens",
    "Traffic",
    "TransformerShape",
    "buckets_of",
    "decoder_bytes",
    "deepspeed_zero2_bytes",
    "deepspeed_zero3_bytes",
    "gpt_parameters",
    "megatron_bytes",
    "memory",
    "memory_svg",
    "memory_table",
    "parameters_of",
    "slices_of",
    "zero_bytes",
    "zero_largest_model",
]
