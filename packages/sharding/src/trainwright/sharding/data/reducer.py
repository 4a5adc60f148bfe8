"""When gradients are reduced: the states of a step, and the hooks that see gradients arrive."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import partial

import torch

from trainwright.sharding.data.buckets import Bucket
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.members import Member

_UNDER_WAY = 1
"""Reductions that stay under way while a backward goes on."""


class Phase(enum.Enum):
    """Where a step is."""

    ACCUMULATING = "accumulating"
    REDUCING = "reducing"
    REDUCED = "reduced"


class Reducer:
    """Starts the reductions of a model's buckets strictly in order, as gradients complete.

    Args:
        buckets: In the order in which they are reduced on every rank.
        early: Whether a reduction may start before `start_all`.
        may_wait: Whether a backward may wait for older reductions, so that of memory that is lent
            only a few buckets have any. It must not where a rank could wait in its backward for
            one that waits for it in a collective of its own backward.
    """

    def __init__(
        self, buckets: Sequence[Bucket], *, early: bool = True, may_wait: bool = False
    ) -> None:
        self.phase = Phase.ACCUMULATING
        self.touched = False
        self._buckets = buckets
        self._early = early
        self._may_wait = may_wait
        self._is_counting = False
        self._epoch = 0
        self._next = 0
        self._collected = 0
        for bucket in buckets:
            for member in bucket.members:
                member.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self.on_gradient, bucket, member)
                )

    @property
    def can_wait(self) -> bool:
        """Whether `finish` has something to finish."""
        return self.phase is Phase.REDUCING

    @property
    def waits_for_backwards(self) -> bool:
        """Whether `start_all` takes part in what other ranks' backwards wait for."""
        return False

    @property
    def in_flight(self) -> bool:
        """Whether a reduction has started and was not waited for."""
        started = self.phase is Phase.ACCUMULATING and self._next > 0
        return started or self.phase is Phase.REDUCING

    def begin(self) -> None:
        """Begin a step without gradients."""
        for bucket in self._buckets:
            bucket.forget_gradients()
        self.phase = Phase.ACCUMULATING
        self.touched = False
        self._is_counting = False
        self._next = 0
        self._collected = 0

    def arm(self) -> None:
        """Count the gradients of the next backward, and start what is complete."""
        self.check_accumulating("last_backward()")
        if not self._is_counting:
            self._count()

    def disarm(self) -> None:
        """Start nothing more before `start_all`: the step is given up."""
        self._is_counting = False

    def join_others(self) -> None:
        """Take part in what other ranks' backwards wait for, before the step is given up."""

    def complete(self, buckets: Sequence[Bucket]) -> None:
        """Let buckets start as soon as those before them have."""
        if self.phase is Phase.ACCUMULATING:
            for bucket in buckets:
                bucket.is_complete = True
            self._start_complete()

    def end_backward(self, buckets: Sequence[Bucket]) -> None:
        """Let buckets start that the counted backward adds no more to, and free older ones.

        Every rank says this of the same buckets in the same order, and has begun what the others
        need to come as far: only then may it wait here.
        """
        if self._is_counting:
            self.complete(buckets)
            self._collect_older()

    def start_all(self) -> None:
        """Start whatever has not started."""
        for bucket in self._buckets[self._next :]:
            bucket.start_reduction()
        self._next = len(self._buckets)
        self.phase = Phase.REDUCING

    def finish(self) -> None:
        """Wait for all reductions, and give the sums to the pieces."""
        for bucket in self._buckets:
            if not bucket.sums.is_lent:
                for member in bucket.members:
                    member.check_linked()
        for bucket in self._buckets:
            bucket.sums.collect()
            bucket.sums.add_partial()
        for bucket in self._buckets:
            bucket.finish_reduction()
        self.phase = Phase.REDUCED
        self._is_counting = False

    def check_accumulating(self, what: str) -> None:
        """Raise where gradients were reduced already."""
        if self.phase is not Phase.ACCUMULATING:
            raise LifecycleError(
                f"{what} after reduce() without zero_grad(); the DataParallel's zero_grad() "
                "begins a step (an optimizer's reaches only its pieces)"
            )

    def on_gradient(self, bucket: Bucket, member: Member, parameter: torch.Tensor) -> None:
        """Runs after autograd added to ``parameter.grad``."""
        gradient = parameter.grad
        if bucket.is_started:
            self._refuse(member)
        if gradient is None:
            return  # the backward had none to give; PyTorch calls the hook all the same
        self.touched = True
        if gradient is not member.gradient:
            bucket.link(member)
        if self._is_counting and member.epoch != self._epoch:
            member.epoch = self._epoch
            bucket.pending -= 1
            if bucket.pending == 0:
                bucket.is_complete = True
                self._start_complete()

    def _count(self) -> None:
        self._is_counting = True
        self._epoch += 1
        for bucket in self._buckets:
            bucket.pending = len(bucket.members)

    def _refuse(self, member: Member) -> None:
        self.check_accumulating(f"a gradient of {member.name} arrived: backward")
        raise LifecycleError(
            f"a second gradient of {member.name} arrived after its reduction had started; call "
            "last_backward() only before the last backward of a step (re-entrant checkpointing "
            "runs several backwards: use use_reentrant=False, or leave last_backward() out)"
        )

    def _start_complete(self) -> None:
        # Strictly in order: ranks whose backwards complete buckets in different orders, or skip
        # layers, still call the same collectives one after the other.
        if not self._early:
            return
        while self._next < len(self._buckets) and self._buckets[self._next].is_complete:
            self._buckets[self._next].start_reduction()
            self._next += 1
        if self._may_wait:
            self._collect_older()

    def _collect_older(self) -> None:
        while self._collected < self._next - _UNDER_WAY:
            bucket = self._buckets[self._collected]
            if bucket.sums.is_lent:
                bucket.sums.collect()
            self._collected += 1
