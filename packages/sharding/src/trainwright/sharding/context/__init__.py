"""Attention over sequences of which each rank holds a part."""

from trainwright.sharding.context.attend import attend
from trainwright.sharding.context.chunked import ChunkedKernel
from trainwright.sharding.context.documents import Documents, Run
from trainwright.sharding.context.gathered import gathered_attention
from trainwright.sharding.context.hybrid import hybrid_attention, hybrid_communicators
from trainwright.sharding.context.kernels import (
    CpuFlashKernel,
    CudaFlashKernel,
    Kernel,
    choose_kernel,
)
from trainwright.sharding.context.layout import ContextLayout
from trainwright.sharding.context.relayout import change_layout
from trainwright.sharding.context.ring import ring_attention
from trainwright.sharding.context.ring_plan import RingPlan, RingStep
from trainwright.sharding.context.spans import Segment, Span, spans_between
from trainwright.sharding.context.ulysses import ulysses_attention

__all__ = [
    "ChunkedKernel",
    "ContextLayout",
    "CpuFlashKernel",
    "CudaFlashKernel",
    "Documents",
    "Kernel",
    "RingPlan",
    "RingStep",
    "Run",
    "Segment",
    "Span",
    "attend",
    "change_layout",
    "choose_kernel",
    "gathered_attention",
    "hybrid_attention",
    "hybrid_communicators",
    "ring_attention",
    "spans_between",
    "ulysses_attention",
]
