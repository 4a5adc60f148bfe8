"""Reductions after every backward, into the range that a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.collectives import Communicator
from trainwright.sharding.data.buckets import Bucket
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.members import Member
from trainwright.sharding.data.reducer import Phase, Reducer


class DrivenRounds(Reducer):
    """Every `start_all` reduces what came since the one before; the caller decides when.

    For pipelines, whose schedule says after which micro-batch a stage is reduced, on every data
    rank alike.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        super().__init__(buckets)
        self._rounds = 0
        self._is_behind = False

    @property
    def can_wait(self) -> bool:
        """Whether a round has started."""
        return self._rounds > 0

    @property
    def in_flight(self) -> bool:
        """Whether a round was started and its sums are not with the pieces."""
        return super().in_flight or (self._rounds > 0 and self.phase is not Phase.REDUCED)

    def begin(self) -> None:
        """Begin a step without gradients."""
        super().begin()
        self._rounds = 0
        self._is_behind = False

    def join_all(self) -> None:
        """Nothing: a schedule that was broken off is not joined again."""
        self.disarm()

    def await_all(self) -> None:
        """Wait for what was started."""
        if self._rounds > 0:
            super().await_all()

    def start_all(self) -> None:
        """Reduce what came since the last round; later gradients belong to the next.

        It waits for the other ranks, which run the same schedule.
        """
        for bucket in self._buckets[self._next :]:
            bucket.start_reduction()
        for bucket in self._buckets:
            # Memory is what rounds are for: it is given back before the caller goes on.
            bucket.collect()
            bucket.reopen()
        self._next = 0
        self._collected = 0
        self._is_counting = False
        self._is_behind = False
        self._rounds += 1

    def finish(self) -> None:
        """Wait for all rounds, and give the sums to the pieces."""
        if self._is_behind:
            raise LifecycleError(
                "wait() with gradients that came after the last reduce(), which nobody would add; "
                "with reduce_each_backward and hooks=False call reduce() after every micro-batch"
            )
        super().finish()
        for bucket in self._buckets:
            bucket.is_started = True

    def on_gradient(self, bucket: Bucket, member: Member, parameter: torch.Tensor) -> None:
        """Runs after autograd added to ``parameter.grad``."""
        super().on_gradient(bucket, member, parameter)
        self._is_behind = True


class BackwardRounds(Reducer):
    """Every backward reduces its own gradients before it returns, so that only ranges are left.

    Ranks may run different numbers of backwards: those that have finished add zeros until all have.

    Args:
        buckets: In the order in which they are reduced on every rank.
        agree: Joins the ranks that step together.
        patience_s: As in `Reducer`.
    """

    def __init__(self, buckets: Sequence[Bucket], agree: Communicator, patience_s: float) -> None:
        super().__init__(buckets, patience_s=patience_s)
        self._agree = agree

    @property
    def waits_for_backwards(self) -> bool:
        """Whether `start_all` takes part in what other ranks' backwards wait for."""
        return True

    @property
    def in_flight(self) -> bool:
        """Whether a reduction has started and was not waited for."""
        return self.phase is Phase.REDUCING or self._next > 0

    def join_all(self) -> None:
        """Take part in the rounds of other ranks, before a step is given up."""
        self.disarm()
        if self.phase is Phase.ACCUMULATING:
            for bucket in self._buckets[self._next :]:
                bucket.drop_gradients()
            self.start_all()

    def arm(self) -> None:
        """Every backward is counted; only check that one may come."""
        self.check_accumulating("last_backward()")

    def on_gradient(self, bucket: Bucket, member: Member, parameter: torch.Tensor) -> None:
        """Runs after autograd added to ``parameter.grad``."""
        if not self._is_counting and self.phase is Phase.ACCUMULATING:
            self.count()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        super().on_gradient(bucket, member, parameter)

    def start_all(self) -> None:
        """Join the rounds of ranks that still run backwards, until none does."""
        is_open = self._next > 0  # a backward raised
        if is_open or any(m.parameter.grad is not None for b in self._lent for m in b.members):
            self._end_backward()  # or gradients were written by hand
        while self._count_unfinished(mine=False):
            self._start_round()
            self._collect_round()
        for bucket in self._buckets:
            if not bucket.sums.is_lent:
                bucket.start_reduction()
            bucket.is_started = True
            bucket.sums.fill()
        self.phase = Phase.REDUCING

    @property
    def _lent(self) -> list[Bucket]:
        return [bucket for bucket in self._buckets if bucket.sums.is_lent]

    def _end_backward(self) -> None:
        self._start_round()
        self._count_unfinished(mine=True)
        self._collect_round()

    def _start_round(self) -> None:
        for bucket in self._buckets[self._next :]:
            bucket.start_reduction()

    def _collect_round(self) -> None:
        self._next = 0
        self._collected = 0
        self._is_counting = False
        for bucket in self._buckets:
            bucket.collect()
            bucket.reopen()

    def _count_unfinished(self, *, mine: bool) -> int:
        # Of reductions that others would wait for in vain: a rank that has run all its backwards
        # learns here that another one is about to reduce.
        count = torch.tensor(int(mine), device=self._agree.device)
        self._agree.all_reduce(count).wait()
        return int(count)
