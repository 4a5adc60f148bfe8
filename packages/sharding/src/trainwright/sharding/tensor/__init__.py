"""Tensor parallelism: layers of which every rank of an axis holds and computes a part."""

from trainwright.sharding.tensor.checks import check_indices, local_heads
from trainwright.sharding.tensor.cross_entropy import vocab_parallel_cross_entropy
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.dropout import DropoutPlace, PlacedDropout, ShardedDim
from trainwright.sharding.tensor.embedding import VocabParallelEmbedding
from trainwright.sharding.tensor.fused_head import linear_cross_entropy, linear_cross_entropy_sum
from trainwright.sharding.tensor.head_loss import HeadLoss
from trainwright.sharding.tensor.heads import HeadLayout
from trainwright.sharding.tensor.initial import draw_parameter_
from trainwright.sharding.tensor.key_value import KeyValueLinear
from trainwright.sharding.tensor.linear import ColumnParallelLinear, RowParallelLinear
from trainwright.sharding.tensor.parallelize import cut_initializer, parallelize, unparallelize
from trainwright.sharding.tensor.parts import join_parts, join_parts_for_terms, sum_part, take_part
from trainwright.sharding.tensor.plans import (
    gpt2_plan,
    llama_plan,
    mistral_plan,
    plan_of,
    qwen_plan,
)
from trainwright.sharding.tensor.replicated import place_partial_, unplace_partial_
from trainwright.sharding.tensor.sequence import (
    SequenceSharding,
    enter_sequence,
    gather_sequence,
    leave_sequence,
    split_sequence,
)
from trainwright.sharding.tensor.styles import (
    Column,
    Dropout,
    Enter,
    HeadNorm,
    JoinSequence,
    KeyValue,
    NoDropout,
    Norm,
    Plan,
    Row,
    SequenceLength,
    SetAttribute,
    SplitSequence,
    Style,
    Vocab,
    Whole,
)

__all__ = [
    "Column",
    "ColumnParallelLinear",
    "Cut",
    "Dropout",
    "DropoutPlace",
    "Enter",
    "HeadLayout",
    "HeadLoss",
    "HeadNorm",
    "JoinSequence",
    "KeyValue",
    "KeyValueLinear",
    "NoDropout",
    "Norm",
    "PlacedDropout",
    "Plan",
    "Row",
    "RowParallelLinear",
    "SequenceLength",
    "SequenceSharding",
    "SetAttribute",
    "ShardedDim",
    "SplitSequence",
    "Style",
    "Vocab",
    "VocabParallelEmbedding",
    "Whole",
    "check_indices",
    "cut_initializer",
    "draw_parameter_",
    "enter_sequence",
    "gather_sequence",
    "gpt2_plan",
    "join_parts",
    "join_parts_for_terms",
    "leave_sequence",
    "linear_cross_entropy",
    "linear_cross_entropy_sum",
    "llama_plan",
    "local_heads",
    "mistral_plan",
    "parallelize",
    "place_partial_",
    "plan_of",
    "qwen_plan",
    "split_sequence",
    "sum_part",
    "take_part",
    "unparallelize",
    "unplace_partial_",
    "vocab_parallel_cross_entropy",
]
