"""The lifecycle of a data-parallel step, whatever the stage."""

from __future__ import annotations

import enum
from functools import partial

import torch
from torch import nn

from trainwright.sharding.data.buckets import Bucket, Member
from trainwright.sharding.data.build import FlatModel
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.layout import GroupLayout
from trainwright.sharding.data.piece import Piece
from trainwright.sharding.mesh import Mesh


class _Phase(enum.Enum):
    ACCUMULATING = "accumulating"
    REDUCING = "reducing"
    REDUCED = "reduced"


class DataParallel:
    """A module whose gradients are summed over the data-parallel ranks, made by `data_parallel`.

    One step: ``zero_grad()``; for each micro-batch forward and backward, with ``last_backward()``
    before the last backward; ``reduce()``; ``wait()``; the optimizer; ``publish()``.

    Every rank reduces every bucket once a step in one fixed order, whatever its backward used: a
    parameter without gradient contributes zeros. Sums are never divided.
    """

    def __init__(self, module: nn.Module, flat: FlatModel, mesh: Mesh) -> None:
        self._module = module
        self._mesh = mesh
        self._flat = flat
        self._buckets = flat.buckets
        self._phase = _Phase.ACCUMULATING
        self._armed = False
        self._touched = False
        self._first = True
        self._epoch = 0
        self._next = 0
        # Parameters that are not themselves what the optimizer updates.
        updated = {id(piece.parameter) for piece in flat.pieces.values()}
        self._copies = [
            member
            for bucket in self._buckets
            for member in bucket.members
            if id(member.parameter) not in updated
        ]
        for bucket in self._buckets:
            for member in bucket.members:
                member.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._on_gradient, bucket, member)
                )

    @property
    def module(self) -> nn.Module:
        """The module that was given, with its own names."""
        return self._module

    @property
    def mesh(self) -> Mesh:
        """The ranks that it was made for."""
        return self._mesh

    @property
    def pieces(self) -> dict[str, Piece]:
        """This rank's part of each trainable parameter, for the optimizer, norm and checkpoint.

        Names are the plain model's, in the order of registration; what this rank keeps nothing of
        is absent.
        """
        return dict(self._flat.pieces)

    @property
    def frozen(self) -> dict[str, Piece]:
        """The parameters that are not trained, whole, for the checkpoint."""
        return dict(self._flat.frozen)

    @property
    def layout(self) -> tuple[GroupLayout, ...]:
        """Where each parameter lies in the flat buffers."""
        return self._flat.layout

    def zero_grad(self, *, discard: bool = False) -> None:
        """Begin a step: forget all gradients.

        Args:
            discard: Allow gradients to be dropped that were accumulated but never reduced.

        Raises:
            LifecycleError: A reduction is in flight, or gradients would be lost.
        """
        if self._in_flight:
            raise LifecycleError(
                "zero_grad() while gradients are being reduced; call reduce() and wait() first"
            )
        if self._phase is _Phase.ACCUMULATING and self._touched and not discard:
            raise LifecycleError(
                "zero_grad() would drop gradients that were accumulated but not reduced; call "
                "reduce() and wait() after the last backward, or zero_grad(discard=True)"
            )
        for bucket in self._buckets:
            bucket.started = False
            for member in bucket.members:
                member.parameter.grad = None
            for kept in bucket.kept:
                kept.piece.parameter.grad = None
        for parameter in self._flat.empty:
            parameter.grad = None
        self._phase = _Phase.ACCUMULATING
        self._armed = False
        self._touched = False
        self._next = 0

    def last_backward(self) -> None:
        """Say that the next backward is the last of this step.

        During it a bucket's reduction starts as soon as all its gradients are complete and the
        buckets before it have started. Without this call everything starts in `reduce`; leave it
        out where weight gradients are written by something other than autograd's backward.

        Raises:
            LifecycleError: The gradients of this step were already reduced.
        """
        self._check_accumulating("last_backward()")
        if self._armed:
            return
        self._armed = True
        self._epoch += 1
        for bucket in self._buckets:
            bucket.pending = len(bucket.members)

    def reduce(self) -> None:
        """Start the reductions that have not started; every rank calls it, also without backward.

        Raises:
            LifecycleError: A parameter was replaced, moved, frozen, unfrozen or added.

        Communicates:
            One all-reduce a bucket (stage 0: 2 (N-1)/N of its bytes a rank), or one reduce-scatter
            (stage 1: (N-1)/N), over the data axes of its group.
        """
        if self._phase is not _Phase.ACCUMULATING:
            return
        self._flat.check_intact()
        if self._first:
            self._flat.check_complete(self._module)
            self._first = False
        for bucket in self._buckets[self._next :]:
            bucket.start_reduction()
        self._next = len(self._buckets)
        self._phase = _Phase.REDUCING

    def wait(self) -> None:
        """Finish the reductions and set the ``grad`` of every piece.

        Raises:
            LifecycleError: `reduce` was not called, or a gradient was replaced since.

        Communicates:
            One all-reduce of the kept range of a bucket for each further axis that its gradients
            are partial on (tp).
        """
        if self._phase is _Phase.REDUCED:
            return
        if self._phase is _Phase.ACCUMULATING:
            raise LifecycleError("wait() before reduce(); call reduce() after the last backward")
        for bucket in self._buckets:
            for member in bucket.members:
                member.check_linked()
        for bucket in self._buckets:
            bucket.finish_data_reduction()
        for bucket in self._buckets:
            bucket.finish_reduction()
            for member in bucket.members:
                # A sharded rank has summed only its range: the whole would mislead.
                member.parameter.grad = None if bucket.sharded else member.gradient
            for kept in bucket.kept:
                kept.piece.parameter.grad = kept.gradient
        self._phase = _Phase.REDUCED
        self._armed = False

    def publish(self) -> None:
        """Make the module's weights equal to the pieces, on every rank.

        Raises:
            LifecycleError: Gradients are in flight or were never reduced, or the module's weights
                were changed by something other than the pieces.

        Communicates:
            Stage 1: one all-gather a bucket over the data axes, (N-1)/N of its weights' bytes.
        """
        if self._in_flight:
            raise LifecycleError("publish() while gradients are being reduced; call wait() first")
        if self._phase is _Phase.ACCUMULATING and self._touched:
            raise LifecycleError(
                "publish() with gradients that were not reduced; call reduce() and wait() before "
                "the optimizer, or zero_grad(discard=True) to drop them"
            )
        changed = [m.name for m in self._copies if m.parameter._version != m.version]
        if changed:
            raise LifecycleError(
                f"the weights of {_shorten(changed)} were changed in place, which publish() would "
                "undo; after loading or editing weights call load_masters(), and build the "
                "optimizer on pieces, not on the module's parameters"
            )
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.start_publishing()
            for bucket in self._buckets:
                bucket.finish_publishing()

    def load_masters(self) -> None:
        """Take the module's weights as they are now for the pieces, after they were changed.

        Weights that were moved out of the flat buffer in the same dtype are copied back.

        Raises:
            LifecycleError: Gradients are in flight, or a parameter was replaced or converted.
        """
        if self._in_flight:
            raise LifecycleError(
                "load_masters() while gradients are being reduced; call wait() first"
            )
        for bucket in self._buckets:
            for member in bucket.members:
                member.return_weight()
        self._flat.check_intact()
        self._flat.check_complete(self._module)
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.load_masters()
        for member in self._copies:
            member.version = member.parameter._version

    @property
    def _in_flight(self) -> bool:
        started = self._phase is _Phase.ACCUMULATING and self._next > 0
        return started or self._phase is _Phase.REDUCING

    def _check_accumulating(self, what: str) -> None:
        if self._phase is not _Phase.ACCUMULATING:
            raise LifecycleError(
                f"{what} after reduce() without zero_grad(); the DataParallel's zero_grad() "
                "begins a step (an optimizer's reaches only its pieces)"
            )

    def _on_gradient(self, bucket: Bucket, member: Member, parameter: torch.Tensor) -> None:
        """Runs after autograd added to ``parameter.grad``."""
        gradient = parameter.grad
        if bucket.started:
            self._refuse(member)
        if gradient is None:
            return  # the backward had none to give; PyTorch calls the hook all the same
        self._touched = True
        if gradient is not member.gradient:
            member.link_gradient()
        if self._armed and member.epoch != self._epoch:
            member.epoch = self._epoch
            bucket.pending -= 1
            if bucket.pending == 0:
                self._start_complete()

    def _refuse(self, member: Member) -> None:
        self._check_accumulating(f"a gradient of {member.name} arrived: backward")
        raise LifecycleError(
            f"a second gradient of {member.name} arrived after its reduction had started; call "
            "last_backward() only before the last backward of a step (re-entrant checkpointing "
            "runs several backwards: use use_reentrant=False, or leave last_backward() out)"
        )

    def _start_complete(self) -> None:
        # Strictly in order: ranks whose backwards complete buckets in different orders, or skip
        # layers, still call the same collectives one after the other.
        while self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
            self._buckets[self._next].start_reduction()
            self._next += 1


def _shorten(names: list[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
