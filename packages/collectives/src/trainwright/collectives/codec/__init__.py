"""Tensors as fewer bytes, with a bound on the error, and collectives that move those bytes."""

from trainwright.collectives.codec.all_reduce import (
    compressed_all_reduce,
    compressed_all_reduce_with_feedback,
)
from trainwright.collectives.codec.blocks import BlockFloat8, BlockInt8
from trainwright.collectives.codec.compressed import (
    compressed_all_gather,
    compressed_all_gather_with_feedback,
    compressed_reduce_scatter,
    compressed_reduce_scatter_with_feedback,
)
from trainwright.collectives.codec.packing import Packing
from trainwright.collectives.codec.protocol import Codec

__all__ = [
    "BlockFloat8",
    "BlockInt8",
    "Codec",
    "Packing",
    "compressed_all_gather",
    "compressed_all_gather_with_feedback",
    "compressed_all_reduce",
    "compressed_all_reduce_with_feedback",
    "compressed_reduce_scatter",
    "compressed_reduce_scatter_with_feedback",
]
