"""Collective operations by the plan of any algorithm.

Each checks its tensors as a communicator does, before any message, and has finished when it
returns.
"""

from __future__ import annotations

import torch

from trainwright.collectives.algorithms.execution import Execution, Passage
from trainwright.collectives.algorithms.plan import Plan
from trainwright.collectives.checks import (
    check_same_dtype,
    check_tensor,
    check_writable,
    resolve_reduce_dtype,
)
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import ReduceOp


def all_reduce_by(
    plan: Plan,
    comm: Passage,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``tensor`` over all ranks, in place; every rank gets the same bits.

    Args:
        plan: This rank's plan, at the end of which it has all results.
        comm: The ranks of the plan.
        tensor: Any shape and strides, the same shape and dtype on all ranks.
        op: How elements are combined.
        reduce_dtype: Dtype in which they are combined and partial results travel; None: at least
            float32 for floating-point tensors. The result is rounded to the tensor's dtype once.
        deterministic: Insist on the bits of the one fixed rule, the sum in rank order in
            ``reduce_dtype``, whatever the number of chunks and ranks a node.

    Raises:
        UsageError: The plan is that of another rank or world, ``op`` has no meaning for the dtype,
            the tensor cannot be written to, or the algorithm cannot be ``deterministic`` because
            it combines in another order than that of the ranks.

    Communicates:
        What the plan says: ``plan.num_sent(tensor.numel(), payload)`` elements of each payload.
    """
    what = f"{plan.algorithm}_all_reduce"
    check_plan(what, plan, comm)
    source = check_tensor(what, tensor, comm.device)
    check_writable(what, source)
    dtype = resolve_reduce_dtype(what, source.dtype, op, reduce_dtype)
    if deterministic:
        _check_order(what, plan, dtype)
    _reduce_in_place(plan, comm, source, op, dtype)


def reduce_by(
    plan: Plan,
    comm: Passage,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``tensor`` over all ranks into that of the plan's root; the others' are unchanged.

    Args, Raises, Communicates: as `all_reduce_by`.
    """
    what = f"{plan.algorithm}_reduce"
    check_plan(what, plan, comm)
    source = check_tensor(what, tensor, comm.device)
    dtype = resolve_reduce_dtype(what, source.dtype, op, reduce_dtype)
    if deterministic:
        _check_order(what, plan, dtype)
    if plan.kept == (0, plan.num_chunks):
        check_writable(what, source)
        _reduce_in_place(plan, comm, source, op, dtype)
    else:
        Execution(comm, plan, source.contiguous().view(-1), None, op, dtype).run()


def reduce_scatter_by(
    plan: Plan,
    comm: Passage,
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``input`` over all ranks; rank r keeps chunk r of its flattened elements.

    Where the number of ranks divides the elements, this is ``Communicator.reduce_scatter``.

    Args:
        plan: This rank's plan, at the end of which it has the results that it keeps.
        comm: The ranks of the plan.
        output: Contiguous, with as many elements as chunk r of ``input`` (see `chunk_bounds`); any
            shape.
        input: The same shape and dtype on all ranks; only read. ``output`` may be chunk r of it.
        op: How elements are combined.
        reduce_dtype, deterministic: As in `all_reduce_by`.

    Raises:
        UsageError: ``output`` has another size or dtype, ``op`` has no meaning for the dtype, the
            plan is that of another rank or world, or cannot be ``deterministic``.

    Communicates:
        What the plan says, in the tensor's dtype or, partial results, in ``reduce_dtype``.
    """
    what = f"{plan.algorithm}_reduce_scatter"
    check_plan(what, plan, comm)
    source = check_tensor(what, input, comm.device)
    target = check_tensor(what, output, comm.device)
    check_same_dtype(what, target, source)
    dtype = resolve_reduce_dtype(what, source.dtype, op, reduce_dtype)
    if deterministic:
        _check_order(what, plan, dtype)
    _check_chunk(what, "output", target, source.numel(), plan)
    _check_contiguous(what, target)
    execution = Execution(comm, plan, source.contiguous().view(-1), None, op, dtype)
    execution.run()
    execution.write(*plan.kept, target.view(-1))


def all_gather_by(plan: Plan, comm: Passage, output: torch.Tensor, input: torch.Tensor) -> None:
    """Put every rank's ``input`` into ``output``: that of rank r becomes its chunk r.

    Where the number of ranks divides the elements, this is ``Communicator.all_gather``.

    Args:
        plan: This rank's plan, at the beginning of which it has the results of its own chunk.
        comm: The ranks of the plan.
        output: Contiguous, of the same shape and dtype on all ranks.
        input: As many elements as chunk r of the flattened ``output`` (see `chunk_bounds`); may be
            that chunk itself.

    Raises:
        UsageError: A tensor has another size or dtype, ``output`` is not contiguous, or the plan
            is that of another rank or world.

    Communicates:
        What the plan says, in the tensor's dtype.
    """
    what = f"{plan.algorithm}_all_gather"
    check_plan(what, plan, comm)
    source = check_tensor(what, input, comm.device)
    target = check_tensor(what, output, comm.device)
    check_same_dtype(what, target, source)
    _check_contiguous(what, target)
    _check_chunk(what, "input", source, target.numel(), plan)
    flat = target.view(-1)
    bounds = plan.bounds(flat.numel())
    start, stop = plan.given
    flat[bounds[start] : bounds[stop]].view(source.shape).copy_(source)
    Execution(comm, plan, flat, flat, ReduceOp.SUM, flat.dtype).run()


def broadcast_by(plan: Plan, comm: Passage, tensor: torch.Tensor) -> None:
    """Copy the ``tensor`` of the plan's root to every rank, in place.

    Args:
        plan: This rank's plan; the root has all results at its beginning.
        comm: The ranks of the plan.
        tensor: Any shape and strides, the same shape and dtype on all ranks.

    Raises:
        UsageError: The tensor cannot be written to, or the plan is that of another rank or world.

    Communicates:
        What the plan says, in the tensor's dtype.
    """
    what = f"{plan.algorithm}_broadcast"
    check_plan(what, plan, comm)
    source = check_tensor(what, tensor, comm.device)
    is_root = plan.given == (0, plan.num_chunks)
    if not is_root:
        check_writable(what, source)
    flat = source.contiguous().view(-1)
    Execution(comm, plan, flat, flat, ReduceOp.SUM, flat.dtype).run()
    if not is_root and not source.is_contiguous():
        source.copy_(flat.view(source.shape))


def _reduce_in_place(
    plan: Plan, comm: Passage, source: torch.Tensor, op: ReduceOp, dtype: torch.dtype
) -> None:
    flat = source.contiguous().view(-1)
    Execution(comm, plan, flat, flat, op, dtype).run()
    if not source.is_contiguous():
        source.copy_(flat.view(source.shape))


def check_plan(what: str, plan: Plan, comm: Passage) -> None:
    """Refuse the plan of another rank or world.

    Raises:
        UsageError: ``plan`` and ``comm`` differ in rank or size.
    """
    if (plan.rank, plan.size) != (comm.rank, comm.size):
        raise UsageError(
            f"{what}: the plan is that of rank {plan.rank} of {plan.size}, this is rank "
            f"{comm.rank} of {comm.size}; make it with comm.size and comm.rank"
        )


def _check_order(what: str, plan: Plan, dtype: torch.dtype) -> None:
    # Whole numbers give the same bits in any order.
    if not plan.in_rank_order and (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            f"{what}: deterministic=True asks for sums in rank order, and {plan.algorithm} adds in "
            "the order in which partial results pass; use direct_all_reduce, "
            "direct_reduce_scatter, master_worker_all_reduce or the communicator's own collectives"
        )


def _check_contiguous(what: str, output: torch.Tensor) -> None:
    if not output.is_contiguous():
        raise UsageError(f"{what}: output is written in order and must be contiguous")


def _check_chunk(what: str, name: str, tensor: torch.Tensor, numel: int, plan: Plan) -> None:
    start, stop = plan.given if name == "input" else plan.kept
    bounds = plan.bounds(numel)
    expected = bounds[stop] - bounds[start]
    if tensor.numel() != expected:
        raise UsageError(
            f"{what}: {name} of rank {plan.rank} must hold the {expected} elements of its chunk "
            f"of {plan.size}, got {tensor.numel()}"
        )
