"""Ring attention: each rank keeps its queries, the keys and values go round."""

# Shapes: B batch, H query heads, K key/value heads, S positions of this rank, E size of a head.

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch.autograd.function import once_differentiable

from trainwright.collectives import Communicator, Recv, Send, Work
from trainwright.sharding.context.attend import scale_of
from trainwright.sharding.context.checks import check_attention
from trainwright.sharding.context.documents import Documents, documents_of
from trainwright.sharding.context.kernels import Kernel, choose_kernel
from trainwright.sharding.context.layout import ContextLayout
from trainwright.sharding.context.merging import MergedOutput, SummedGradients
from trainwright.sharding.context.ring_plan import RingPlan, RingStep
from trainwright.sharding.context.time_order import Range

Pair = tuple[torch.Tensor, torch.Tensor]


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: ContextLayout,
    comm: Communicator,
    documents: torch.Tensor | Documents | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention of this rank's queries to the whole sequence.

    The next block of keys and values travels while one is worked on, and only keys that are seen
    travel. The backward does the same again, and sends gradients to the owners of the keys.

    Args:
        q: This rank's queries [B, H, S_local, E].
        k: This rank's keys [B, K, S_local, E]; each serves H / K neighbouring query heads.
        v: This rank's values [B, K, S_local, F]; the fused kernels need F = E.
        layout: Which positions each rank holds; zigzag gives ranks alike much to do.
        comm: The ranks of the sequence, in the order of the layout.
        documents: Of the whole sequences, the same on all ranks: numbers [B, length], negative for
            padding, or `Documents` made once for all layers. None: one document.
        causal: Whether a position sees none after itself.
        scale: Of the scores; None: 1 / sqrt(E).

    Returns:
        [B, H, S_local, F], 0 where no key is visible. Gradients are those of the plain attention;
        each rank's loss must reach its output, if only with a zero gradient.

    Raises:
        ShardingError: The layout is for another number of ranks or the documents for another
            length, or the tensors do not fit each other or the layout.

    Communicates:
        Forward, point to point, the keys and values of other ranks that this rank's queries see;
        backward the same, and their gradients in at least float32. At most, and for one document,
        2 · B · K · E · (length - S_local) elements in forward; causal zigzag three quarters of it.

    Source:
        Liu, Zaharia, Abbeel 2023, Ring Attention; zigzag as in Brandon et al. 2023, Striped
        Attention, §3, with two chunks a rank.
    """
    known = documents_of(documents)
    check_attention(q, k, v, layout, comm, known)
    ranges, rank = layout.ranges, comm.rank
    plan = (known or layout).memo.once(
        ("ring", ranges, rank, causal),
        lambda: RingPlan.of(ranges, ranges, rank, causal=causal, documents=known),
    )
    return ring_of_plan(q, k, v, plan, comm, scale)


def ring_of_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: RingPlan,
    comm: Communicator,
    scale: float | None,
) -> torch.Tensor:
    """Return the attention that a plan describes, for tensors that fit it."""
    run = _Run(plan, comm, choose_kernel(q, k, v), scale_of(q, scale))
    found: torch.Tensor = _RingAttention.apply(q, k, v, run)  # type: ignore[no-untyped-call]
    return found


@attrs.frozen(eq=False)
class _Run:
    plan: RingPlan
    comm: Communicator
    kernel: Kernel
    scale: float


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: _Run
    ) -> torch.Tensor:
        merged = MergedOutput(q, v.shape[-1], run.kernel, run.scale)
        blocks = _Blocks((k, v), run)
        for step in run.plan.steps:
            merged.add(*blocks.take(step), step.spans)
        out, lse = merged.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.run = run
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        run: _Run = ctx.run
        sums = SummedGradients(q, out, lse, grad_out, run.kernel, run.scale)
        blocks = _Blocks((k, v), run)
        own, *others = run.plan.steps
        returns = _Returns(sums.add(*blocks.take(own), own.spans), run)
        for step in others:
            returns.start(step, sums.add(*blocks.take(step), step.spans))
        grad_k, grad_v = returns.finish()
        return sums.of_queries(), grad_k.to(k.dtype), grad_v.to(v.dtype), None


class _Blocks:
    """Keys and values of each step in turn; the next ones come meanwhile."""

    def __init__(self, own: Pair, run: _Run) -> None:
        self._own = own
        self._comm = run.comm
        self._left = list(run.plan.steps)
        self._coming: tuple[Work | None, Pair] = (None, own)

    def take(self, step: RingStep) -> Pair:
        """Return what a step works on, and start to get what the one after it does."""
        work, block = self._coming
        if work is not None:
            work.wait()
        assert self._left[0] is step, "steps are taken in order"
        self._left.pop(0)
        if self._left:
            self._coming = self._start(self._left[0])
        return block

    def _start(self, step: RingStep) -> tuple[Work | None, Pair]:
        messages: list[Send | Recv] = []
        if step.given is not None:
            part = slice(*step.given)
            messages += [Send(tensor[:, :, part].contiguous(), step.user) for tensor in self._own]
        first, last = step.taken or (0, 0)
        k, v = (
            tensor.new_empty((*tensor.shape[:2], last - first, tensor.shape[3]))
            for tensor in self._own
        )
        if step.taken is not None:
            messages += [Recv(k, step.owner), Recv(v, step.owner)]
        return (self._comm.exchange(messages) if messages else None), (k, v)


class _Returns:
    """Sends gradients to the owners of keys, and sums what comes back to this rank's own."""

    def __init__(self, own: Pair, run: _Run) -> None:
        self._own = own
        self._comm = run.comm
        self._coming: tuple[Work | None, Range, Pair] | None = None

    def start(self, step: RingStep, found: Pair) -> None:
        """Send what a step found, and start to get what another found for this rank."""
        self._add()
        messages: list[Send | Recv] = []
        if step.taken is not None:
            messages += [Send(grad.contiguous(), step.owner) for grad in found]
        first, last = step.given or (0, 0)
        k, v = (
            grad.new_empty((*grad.shape[:2], last - first, grad.shape[3])) for grad in self._own
        )
        if step.given is not None:
            messages += [Recv(k, step.user), Recv(v, step.user)]
        work = self._comm.exchange(messages) if messages else None
        self._coming = (work, (first, last), (k, v))

    def finish(self) -> Pair:
        """Return the gradients of this rank's keys and values."""
        self._add()
        return self._own

    def _add(self) -> None:
        if self._coming is None:
            return
        work, ends, found = self._coming
        self._coming = None
        if work is not None:
            work.wait()
        for grad, part in zip(self._own, found, strict=True):
            grad[:, :, slice(*ends)].add_(part)
