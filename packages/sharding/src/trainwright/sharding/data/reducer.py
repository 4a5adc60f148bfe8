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

PATIENCE_S = 0.5
"""How long a backward waits at most for older reductions."""

_MOST_PAUSES = 512

_OUTSIDE = -1


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
        patience_s: How long a backward waits for older reductions, so that of memory that is lent
            only a few buckets have any. Never for ever: the rank that is late with one may itself
            wait for this rank, in another collective of its backward. After a wait in vain
            backwards only free what is done: one of them, then two, then four, and so on.
    """

    def __init__(
        self, buckets: Sequence[Bucket], *, early: bool = True, patience_s: float = 0.0
    ) -> None:
        self.phase = Phase.ACCUMULATING
        self.touched = False
        self._buckets = buckets
        self._early = early
        self._patience_s = patience_s
        self._waits = True
        self._pause = 0
        self._next_pause = 1
        self._is_counting = False
        self._epoch = 0
        self._counted: set[int] = set()
        self._ended: tuple[int, list[Bucket]] = (_OUTSIDE, [])
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
            self.count()

    def disarm(self) -> None:
        """Start nothing more before `start_all`: the step is given up."""
        self._is_counting = False

    def join_all(self) -> None:
        """Take part in all reductions that other ranks may have begun, before a step is given up.

        On all ranks alike, wherever each of them was; `await_all` follows.
        """
        self.disarm()
        if self.phase is not Phase.ACCUMULATING:
            return
        for bucket in self._buckets[: self._next]:
            bucket.collect()
        for bucket in self._buckets[self._next :]:
            # One after the other, and zeros: what led here may be that memory ran out.
            bucket.drop_gradients()
            bucket.start_reduction()
            self._next += 1
            bucket.collect()
        self.phase = Phase.REDUCING

    def complete(self, buckets: Sequence[Bucket]) -> None:
        """Let buckets start as soon as those before them have."""
        if self.phase is Phase.ACCUMULATING:
            for bucket in buckets:
                bucket.is_complete = True
            self._start_complete()

    def end_backward(self, buckets: Sequence[Bucket]) -> None:
        """Learn that no unit computes with these in the running backward any more.

        If it is one that is counted they start as soon as what it still adds to them has come.
        """
        task = torch._C._current_graph_task_id()
        if self._is_counting and task in self._counted:
            self._end(buckets)
        elif task == self._ended[0]:
            self._ended[1].extend(buckets)
        else:
            # Not yet known to be one: torch.autograd.grad adds nothing to any gradient.
            self._ended = (task, list(buckets))

    def start_all(self) -> None:
        """Start whatever has not started."""
        for bucket in self._buckets[self._next :]:
            bucket.start_reduction()
            self._next += 1
        self.phase = Phase.REDUCING

    def finish(self) -> None:
        """Wait for all reductions, and give the sums to the pieces."""
        for bucket in self._buckets:
            if not bucket.sums.is_lent:
                for member in bucket.members:
                    member.check_linked()
        self.await_all()

    def await_all(self) -> None:
        """The second half of `finish`, whatever has become of gradients meanwhile."""
        if self.phase is Phase.REDUCED:
            return
        for bucket in self._buckets:
            bucket.collect()
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
        # None: the backward had none to give; PyTorch calls the hook all the same.
        if gradient is not None:
            self.touched = True
            if gradient is not member.gradient:
                bucket.link(member)
        if self._is_counting:
            self._note(bucket, member)

    def count(self) -> None:
        """Count the gradients that come from here on."""
        self._is_counting = True
        self._epoch += 1
        self._counted.clear()
        if self._waits:
            self._next_pause = 1
        self._waits = self._pause == 0
        self._pause = max(0, self._pause - 1)
        for bucket in self._buckets:
            bucket.pending = len(bucket.members)

    def _note(self, bucket: Bucket, member: Member) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._counted:
            self._counted.add(task)
            if task == self._ended[0]:
                self._end(self._ended[1])
        if member.epoch != self._epoch:
            member.epoch = self._epoch
            bucket.pending -= 1
            if bucket.pending == 0:
                bucket.is_complete = True
                self._start_complete()

    def _end(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if not bucket.is_started:
                # What a cast that outlives its unit (autocast's) still has to give.
                missing = [m for m in bucket.members if m.epoch != self._epoch]
                bucket.pending = sum(map(_is_coming, missing))
                bucket.is_complete |= bucket.pending == 0
        if self.phase is Phase.ACCUMULATING:
            self._start_complete()

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
        self._collect_older()

    def _collect_older(self) -> None:
        while self._collected < self._next:
            bucket = self._buckets[self._collected]
            if self._collected >= self._next - _UNDER_WAY and bucket.sums.meets_others:
                return
            is_lent = bucket.sums.is_lent
            # Asking is taking part: without it a rank that is early would leave its share of all
            # sums for the end of the backward, when the others have done theirs.
            if not bucket.sums.is_collectable(self._patience_s if is_lent and self._waits else 0.0):
                if is_lent:
                    self._stop_waiting()
                return
            if bucket.sums.leaves_early:
                bucket.collect()
            self._collected += 1

    def _stop_waiting(self) -> None:
        if self._waits:
            self._waits = False
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, _MOST_PAUSES)


def _is_coming(member: Member) -> bool:
    """Return whether the running backward adds to a parameter's gradient."""
    if not member.parameter.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(member.parameter).node
    return bool(torch._C._will_engine_execute_node(node))
