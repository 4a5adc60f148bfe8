"""One flat buffer, and the gradients that are views of it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from trainwright.collectives.buckets.plan import FlatBucket
from trainwright.collectives.calls import describe_dtype
from trainwright.collectives.placing import empty_on
from trainwright.collectives.protocol import Communicator, ReduceOp, Work


@attrs.define(eq=False)
class Member:
    """A parameter and what has become of its gradient since the last reduction.

    Args:
        parameter: The parameter.
        place: Where its gradient lies in a flat buffer; nobody else has this tensor.
        number: Of the bucket of that buffer.
        is_used: Whether a backward of this rank, or somebody by hand, has given it a gradient.
        has_arrived: Whether the backward that reduces is done with it.
        had_gradient: Whether it had one when its bucket was launched.
    """

    parameter: torch.Tensor
    place: torch.Tensor
    number: int
    is_used: bool = False
    has_arrived: bool = False
    had_gradient: bool = False

    @property
    def is_linked(self) -> bool:
        """Whether the gradient lies in the buffer: who assigns to its ``data`` takes it away."""
        gradient = self.parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return False
        is_as_stored = not (gradient.is_conj() or gradient.is_neg())
        return is_as_stored and gradient.is_set_to(self.place)

    def link(self) -> str | None:
        """Let the gradient, if there is one, lie in the buffer, with the values that it has.

        Returns:
            What is wrong with it if it cannot.
        """
        gradient = self.parameter.grad
        if gradient is None:
            return None
        if gradient.requires_grad:
            return (
                "got a gradient that is part of a graph, which a reduction would lose; take it "
                "with torch.autograd.grad(create_graph=True), or .detach() it"
            )
        if self.is_linked:
            return None
        place = self.place
        if gradient.layout is not torch.strided:
            return "got a sparse gradient; use sparse=False"
        if gradient.shape != place.shape or gradient.dtype is not place.dtype:
            return (
                f"got a gradient {describe_dtype(gradient.dtype)}{list(gradient.shape)} and has "
                f"room for {describe_dtype(place.dtype)}{list(place.shape)}; make new "
                "GradientBuckets for a module that has been changed"
            )
        with torch.no_grad():
            # A transpose of what lies there would be overwritten while it is read.
            is_inside = gradient.untyped_storage().data_ptr() == place.untyped_storage().data_ptr()
            place.copy_(gradient.clone() if is_inside else gradient)
        self.give()
        self.is_used = True
        return None

    def give(self) -> None:
        """Let the parameter have what lies in the buffer as its gradient."""
        self.parameter.grad = self.place.detach()


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
            place = self._flat[slot.offset :].as_strided(slot.shape, slot.strides)
            member = self.members[slot.name] = Member(parameters[slot.name], place, number)
            before = old.pop(slot.name, None)
            is_known = before is not None and before.is_linked
            member.link()  # what is wrong is told when it is reduced
            if before is not None and is_known:
                member.is_used = before.is_used
        self.pending = len(self.members)

    def launch(self, op: ReduceOp, reduce_dtype: torch.dtype | None) -> list[str]:
        """Start the reduction; the parameters have no gradient until it is finished.

        So nobody reads, and no backward adds to, memory that is under way.

        Returns:
            What is wrong with gradients, which count as none.
        """
        problems: list[str] = []
        for name, member in self.members.items():
            problem = member.link()
            if problem is not None:
                problems.append(f"{name} {problem}")
                member.parameter.grad = None
            member.had_gradient = member.parameter.grad is not None
            if not member.had_gradient:
                member.is_used = False
                member.place.zero_()
            member.parameter.grad = None
        self._work = self._comm.all_reduce(self._flat, op, reduce_dtype=reduce_dtype)
        return problems

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
