"""Attention over sequences of which each rank holds a part."""

from trainwright.sharding.context.attend import attend
from trainwright.sharding.context.chunked import ChunkedKernel
from trainwright.sharding.context.documents import Documents, Run
from trainwright.sharding.context.gathered import gathered_attention
from trainwright.sharding.context.kernels import (
    CpuFlashKernel,
    CudaFlashKernel,
    Kernel,
    choose_kernel,
)
from trainwright.sharding.context.layout import ContextLayout
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
    "choose_kernel",
    "gathered_attention",
    "ring_attention",
    "spans_between",
    "ulysses_attention",
]
