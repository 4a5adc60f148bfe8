"""Tensor parallelism: layers of which every rank of an axis holds and computes a part."""

from trainwright.sharding.tensor.checks import check_indices, local_heads
from trainwright.sharding.tensor.cross_entropy import vocab_parallel_cross_entropy
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.embedding import VocabParallelEmbedding
from trainwright.sharding.tensor.fused_head import linear_cross_entropy, linear_cross_entropy_sum
from trainwright.sharding.tensor.head_loss import HeadLoss
from trainwright.sharding.tensor.initial import draw_parameter_
from trainwright.sharding.tensor.linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "Cut",
    "HeadLoss",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "check_indices",
    "draw_parameter_",
    "linear_cross_entropy",
    "linear_cross_entropy_sum",
    "local_heads",
    "vocab_parallel_cross_entropy",
]
