"""One flat buffer, and the gradients that are views of it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from trainwright.collectives.buckets.plan import FlatBucket
from trainwright.collectives.placing import empty_on
from trainwright.collectives.protocol import Communicator, ReduceOp, Work


@attrs.define(eq=False)
class Member:
    """A parameter and what has become of its gradient since the last reduction.

    Args:
        parameter: The parameter.
        view: Its place in a flat buffer.
        number: Of the bucket of that buffer.
        is_used: Whether a backward of this rank, or somebody by hand, has given it a gradient.
        has_arrived: Whether the backward that reduces is done with it.
        had_gradient: Whether it had one when its bucket was launched.
    """

    parameter: torch.Tensor
    view: torch.Tensor
    number: int
    is_used: bool = False
    has_arrived: bool = False
    had_gradient: bool = False

    def link(self) -> None:
        """Let the gradient, if there is one, be the view, with the values that it has."""
        gradient = self.parameter.grad
        if gradient is not None and gradient is not self.view:
            self.view.copy_(gradient)
            self.parameter.grad = self.view
            self.is_used = True


class Bucket:
    """A flat buffer that is reduced at once.

    Args:
        plan: What lies in it.
        comm: The ranks; the buffer lives where it wants it.
    """

    def __init__(self, plan: FlatBucket, comm: Communicator) -> None:
        self.members: dict[str, Member] = {}
        self.pending = 0
        self._plan = plan
        self._comm = comm
        self._flat = empty_on(comm, (plan.numel,), dtype=plan.dtype)
        self._work: Work | None = None

    @property
    def is_launched(self) -> bool:
        """Whether the buffer is under way."""
        return self._work is not None

    def take(
        self, number: int, parameters: Mapping[str, torch.Tensor], old: dict[str, Member]
    ) -> None:
        """Take the parameters in, with what they have accumulated in the buckets of ``old``.

        Args:
            number: Of this bucket.
            parameters: By name.
            old: Is emptied on the way, so that their buckets' memory goes bit by bit.
        """
        for slot in self._plan.slots:
            view = self._flat[slot.offset :].as_strided(slot.shape, slot.strides)
            member = self.members[slot.name] = Member(parameters[slot.name], view, number)
            before = old.pop(slot.name, None)
            is_new = before is None or member.parameter.grad is not before.view
            member.link()
            if before is not None and not is_new:
                member.is_used = before.is_used
        self.pending = len(self.members)

    def launch(self, op: ReduceOp, reduce_dtype: torch.dtype | None) -> None:
        """Start the reduction; the parameters have no gradient until it is finished.

        So nobody reads, and no backward adds to, memory that is under way.
        """
        for member in self.members.values():
            member.link()
            member.had_gradient = member.parameter.grad is not None
            if not member.had_gradient:
                member.is_used = False
                member.view.zero_()
            member.parameter.grad = None
        self._work = self._comm.all_reduce(self._flat, op, reduce_dtype=reduce_dtype)

    def wait(self, timeout_s: float | None) -> None:
        """Wait for the sums."""
        assert self._work is not None
        self._work.wait(timeout_s)

    def reopen(self) -> None:
        """Take gradients again."""
        self._work = None
        self.pending = len(self.members)
        for member in self.members.values():
            member.is_used = member.has_arrived = member.had_gradient = False
