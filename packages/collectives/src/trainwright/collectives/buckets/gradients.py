"""Gradients of one's own module, reduced over ranks while the backward still runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils.hooks import RemovableHandle

from trainwright.collectives.buckets.agreement import (
    agree_on_order,
    agree_on_plan,
    raise_problems,
    raise_unused,
)
from trainwright.collectives.buckets.bucket import Bucket, Member
from trainwright.collectives.buckets.parameters import Parameters, named, reducible, unfrozen
from trainwright.collectives.buckets.plan import DEFAULT_BUCKET_BYTES, BucketPlan, plan_buckets
from trainwright.collectives.checks import check_timeout
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Communicator, ReduceOp


class GradientBuckets:
    """Reduces the gradients of a module in flat buckets, each as soon as it is complete.

    The training loop stays as it is, with one more line::

        loss.backward()
        buckets.finish()
        optimizer.step()

    A backward adds gradients up in the buckets and starts reductions in the order of the plan,
    which is the same on all ranks whatever their backwards do. From then until `finish` the
    parameters of a started bucket have no gradient (``None``): the memory belongs to the
    reduction. After `finish` each gradient is a view of a bucket. Setting gradients to None,
    zeroing them in place and replacing them are all allowed between a `finish` and the next
    backward, and between backwards inside `accumulate`. With SUM they must not be kept over a
    `finish`: what is already a sum over the ranks would be summed again.

    The first `finish` also lays the buckets out anew, in the order in which rank 0's gradients
    came, unless `rebuild` has been given an order.

    Args:
        parameters: A module or (name, parameter) pairs; what is not trained now is left out. All
            ranks give the same ones, with equal weights.
        comm: The ranks; parameters live on its device.
        bucket_bytes: The most bytes of a bucket, see `plan_buckets`.
        op: AVG, or SUM where the loss has been divided by a number of the whole batch.
        reduce_dtype: What contributions are added in; None: at least float32.
        allow_unused: What `finish` does where a parameter has got no gradient since the last one
            on some rank, in any of the backwards. False: it raises on every rank. True: the
            missing contributions are zeros, and parameters without gradient on every rank are
            left without one.

    Raises:
        UsageError: As `plan_buckets`; a parameter is on another device; ``op`` is another one;
            ranks gave different parameters (on every rank, naming the first difference).

    Communicates:
        Now an all-gather of 256 bytes a rank. A step: one all-reduce a bucket, and in `finish` one
        of 4 bytes a parameter.

    Source: Li et al.: PyTorch Distributed (2020), section 3.2.
    """

    def __init__(
        self,
        parameters: Parameters,
        comm: Communicator,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        op: ReduceOp = ReduceOp.AVG,
        reduce_dtype: torch.dtype | None = None,
        allow_unused: bool = False,
    ) -> None:
        self._comm = comm
        self._op = op
        self._reduce_dtype = reduce_dtype
        self._bucket_bytes = bucket_bytes
        self._allow_unused = allow_unused
        self._settings = f"op={op}, reduce_dtype={reduce_dtype}, allow_unused={allow_unused}"
        self._parameters: dict[str, torch.Tensor] = {}
        problem = plan = None
        try:
            given = named(parameters)
            self._frozen = [pair for pair in given if not pair[1].requires_grad]
            self._parameters = reducible(given, comm, op, reduce_dtype)
            plan = plan_buckets(self._parameters.items(), bucket_bytes=bucket_bytes)
        except UsageError as error:
            problem = f"GradientBuckets: {error}"
        agree_on_plan(comm, self._settings, plan, problem)
        assert plan is not None
        self._plan = plan
        self._members: dict[str, Member] = {}
        self._buckets: list[Bucket] = []
        self._num_launched = 0
        self._is_accumulating = False
        self._came: dict[str, None] = {}  # in order of arrival, until the first `finish`
        self._is_first, self._has_own_order = True, False
        self._problems: list[str] = []
        self._lay_out(plan)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._arrive, name)
            )
            for name, parameter in self._parameters.items()
        ]

    @property
    def plan(self) -> BucketPlan:
        """Where gradients lie now."""
        return self._plan

    def __repr__(self) -> str:
        """Tell the numbers of parameters, buckets and bytes."""
        return (
            f"GradientBuckets({len(self._parameters)} parameters in {len(self._buckets)} buckets, "
            f"{self._plan.num_bytes} bytes, {self._op.name} over {self._comm!r})"
        )

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let backwards inside only add up on this rank; the next one outside reduces it all.

        Ranks may accumulate over different numbers of backwards. If the last one is inside too,
        `finish` starts all reductions.
        """
        before = self._is_accumulating
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = before

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait until every gradient is the average, or sum, over the ranks.

        Args:
            timeout_s: How long each bucket may take; None: the communicator's own time.

        Raises:
            UnusedParameterError: A parameter has got no gradient on some rank, and that is not
                allowed; on every rank alike, naming parameters and ranks.
            UsageError: A gradient came after its bucket had been started, was sparse, part of a
                graph (``create_graph``) or of another shape or dtype than at first, or a parameter
                has been unfrozen; on every rank alike. After these none has a gradient.

        Communicates:
            An all-reduce of each bucket that has not been started and one of 4 bytes a parameter,
            the result of which the host reads; before an error also an all-gather of names; the
            first time what `rebuild` does.
        """
        check_timeout("finish", timeout_s)
        uses = self._launch_rest()
        counts = torch.tensor([*uses, len(self._problems)], dtype=torch.int32)
        counts = counts.to(self._comm.device)
        work = self._comm.all_reduce(counts, timeout_s=timeout_s)
        for bucket in self._buckets:
            bucket.wait(timeout_s)
        work.wait(timeout_s)
        *used_by, num_problems = counts.tolist()
        had = [self._members[name].had_gradient for name in self._parameters]
        problems = self._begin_anew()
        if num_problems:
            raise_problems(self._comm, problems)
        if not self._allow_unused and min(used_by) < self._comm.size:
            raise_unused(self._comm, list(self._parameters), uses)
        for name, count, had_one in zip(self._parameters, used_by, had, strict=True):
            if count or had_one:
                self._members[name].give()
        if self._is_first and not self._has_own_order:
            self.rebuild()
        self._is_first = False

    def rebuild(self, order: Sequence[str] | None = None) -> None:
        """Lay the buckets out anew, with what has been accumulated; all ranks call it.

        The first `finish` does so by itself; this is for an order of one's own, which stays.

        Args:
            order: The names in the order in which gradients become ready, the same on all ranks;
                None: that in which rank 0's came before the first `finish`, others last.

        Raises:
            UsageError: Reductions are under way: `finish` first; ``order`` has other names, or
                differs between ranks (on every rank).

        Communicates:
            An all-gather of 256 bytes a rank, and without ``order`` a broadcast of 8 bytes a
            parameter before.
        """
        if self._num_launched:
            raise UsageError("rebuild: reductions are under way; call finish() first")
        problem = plan = None
        is_own = order is not None
        if order is None:
            order = agree_on_order(self._comm, self._plan.names, self._came)
        try:
            plan = plan_buckets(
                self._parameters.items(), bucket_bytes=self._bucket_bytes, order=order
            )
        except UsageError as error:
            problem = f"rebuild: {error}"
        agree_on_plan(self._comm, self._settings, plan, problem)
        assert plan is not None
        self._has_own_order = is_own
        if plan != self._plan:
            self._lay_out(plan)

    def guard(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Let ``optimizer.step()`` raise while gradients wait for `finish`.

        Returns:
            A handle, the ``remove()`` of which ends it.
        """

        def refuse(*_: object) -> None:
            held = (m for m in self._members.values() if m.parameter.grad is not None)
            if self._num_launched or any(member.is_used for member in held):
                raise UsageError("optimizer.step() before finish() of the GradientBuckets")

        return optimizer.register_step_pre_hook(refuse)

    def remove(self) -> None:
        """Let backwards be without this object; gradients stay where they are.

        Raises:
            UsageError: Reductions are under way: `finish` first.
        """
        if self._num_launched:
            raise UsageError("remove: reductions are under way; call finish() first")
        for hook in self._hooks:
            hook.remove()

    def _lay_out(self, plan: BucketPlan) -> None:
        old, self._members = self._members, {}
        self._plan = plan
        self._buckets = []  # whose memory goes while its gradients move
        for number, layout in enumerate(plan.buckets):
            bucket = Bucket(layout, self._comm)
            bucket.take(number, self._parameters, old)
            self._buckets.append(bucket)
            self._members.update(bucket.members)

    def _arrive(self, name: str, parameter: torch.Tensor) -> None:
        """Take a gradient that autograd has added to; called for None as well."""
        member = self._members[name]
        gradient = parameter.grad
        if member.number < self._num_launched:
            if gradient is not None:
                self._drop(
                    member,
                    f"{name} got a gradient after its bucket had been started: let all backwards "
                    "before finish() but the last be inside accumulate(), or all",
                )
            return
        problem = member.link()
        if problem is not None:
            self._drop(member, f"{name} {problem}")
        elif gradient is not None:
            member.is_used = True
            if self._is_first:
                self._came[name] = None
        if self._is_accumulating or member.has_arrived:
            return
        member.has_arrived = True
        buckets = self._buckets
        buckets[member.number].pending -= 1
        # Strictly in order, so that all ranks start the same.
        while self._num_launched < len(buckets) and not buckets[self._num_launched].pending:
            self._launch_next()

    def _drop(self, member: Member, problem: str) -> None:
        # Raising here would leave the ranks that had none of it to wait in vain.
        member.parameter.grad = None
        self._problems.append(problem)

    def _launch_next(self) -> None:
        with torch.no_grad():
            bucket = self._buckets[self._num_launched]
            self._problems += bucket.launch(self._op, self._reduce_dtype)
        self._num_launched += 1

    def _launch_rest(self) -> list[bool]:
        """Start what has not been started; return which parameters got gradients."""
        self._problems += unfrozen(self._frozen)
        while self._num_launched < len(self._buckets):
            self._launch_next()
        return [self._members[name].is_used for name in self._parameters]

    def _begin_anew(self) -> list[str]:
        """Take gradients again; return what went wrong before."""
        for bucket in self._buckets:
            bucket.reopen()
        self._num_launched = 0
        problems, self._problems = self._problems, []
        return problems
