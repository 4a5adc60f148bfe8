"""What carries a row's messages: a communicator itself, plans over its messages, a recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from trainwright.collectives import Communicator, Recorded, Recv, ReduceOp, Send, Work
from trainwright.collectives import algorithms as plans
from trainwright.collectives.algorithms import Plan


@attrs.frozen
class Algorithms:
    """The plans of one family, from size, rank and where there is one root."""

    all_reduce: Callable[[int, int], Plan]
    reduce_scatter: Callable[[int, int], Plan]
    all_gather: Callable[[int, int], Plan]
    broadcast: Callable[[int, int, int], Plan]
    reduce: Callable[[int, int, int], Plan]


RINGS = Algorithms(
    plans.ring_all_reduce_plan,
    plans.bidirectional_ring_reduce_scatter_plan,
    plans.ring_all_gather_plan,
    plans.ring_broadcast_plan,
    plans.ring_reduce_plan,
)
TREES = Algorithms(
    plans.double_tree_all_reduce_plan,
    plans.halving_doubling_reduce_scatter_plan,
    plans.halving_doubling_all_gather_plan,
    plans.double_tree_broadcast_plan,
    plans.double_tree_reduce_plan,
)


class Done:
    """The work of what has finished."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return True."""
        return True


class Planned:
    """A `Communicator` whose collectives are plans run over the messages of another one.

    A collective has finished when it returns. Messages of plans travel apart from those of users.
    """

    def __init__(self, comm: Communicator, algorithms: Algorithms) -> None:
        self._comm = comm
        self._by = algorithms
        wire = comm.split(0, comm.rank)
        assert wire is not None
        self._wire = wire
        self.rank, self.size = comm.rank, comm.size
        self.device, self.name = comm.device, comm.name

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        reduce_dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        plan = self._by.all_reduce(self.size, self.rank)
        plans.all_reduce_by(plan, self._wire, tensor, op, reduce_dtype=reduce_dtype)
        return Done()

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        reduce_dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        plan = self._by.reduce_scatter(self.size, self.rank)
        plans.reduce_scatter_by(plan, self._wire, output, input, op, reduce_dtype=reduce_dtype)
        return Done()

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, timeout_s: float | None = None
    ) -> Work:
        plans.all_gather_by(self._by.all_gather(self.size, self.rank), self._wire, output, input)
        return Done()

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        if output_splits is None and input_splits is None:
            plan = plans.direct_all_to_all_plan(self.size, self.rank)
            plans.all_to_all_by(plan, self._wire, output, input)
            return Done()
        leaving = input.split(list(input_splits or _even(input, self.size)))
        coming = output.split(list(output_splits or _even(output, self.size)))
        messages: list[Send | Recv] = []
        for peer in range(self.size):
            if peer == self.rank:
                coming[peer].copy_(leaving[peer])
                continue
            if leaving[peer].numel():
                messages.append(Send(leaving[peer], peer))
            if coming[peer].numel():
                messages.append(Recv(coming[peer], peer))
        self._wire.exchange(messages).wait()
        return Done()

    def broadcast(self, tensor: torch.Tensor, root: int, *, timeout_s: float | None = None) -> Work:
        plans.broadcast_by(self._by.broadcast(self.size, self.rank, root), self._wire, tensor)
        return Done()

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: ReduceOp = ReduceOp.SUM,
        *,
        reduce_dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        plan = self._by.reduce(self.size, self.rank, root)
        plans.reduce_by(plan, self._wire, tensor, op, reduce_dtype=reduce_dtype)
        return Done()

    def scatter(self, *arguments: Any, **options: Any) -> Work:
        return self._comm.scatter(*arguments, **options)

    def gather(self, *arguments: Any, **options: Any) -> Work:
        return self._comm.gather(*arguments, **options)

    def send(self, *arguments: Any, **options: Any) -> Work:
        return self._comm.send(*arguments, **options)

    def recv(self, *arguments: Any, **options: Any) -> Work:
        return self._comm.recv(*arguments, **options)

    def exchange(self, *arguments: Any, **options: Any) -> Work:
        return self._comm.exchange(*arguments, **options)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        self.all_reduce(torch.zeros(1))

    def split(self, color: int | None, key: int = 0) -> Planned | None:
        part = self._comm.split(color, key)
        return None if part is None else Planned(part, self._by)

    @contextmanager
    def coalesce(self) -> Iterator[Work]:
        yield Done()

    def abort(self, cause: BaseException | str) -> None:
        self._comm.abort(cause)


def _even(tensor: torch.Tensor, size: int) -> list[int]:
    return [tensor.shape[0] // size] * size


COMMUNICATORS: dict[str, Callable[[Communicator], Communicator]] = {
    "direct": lambda comm: comm,
    "rings": lambda comm: Planned(comm, RINGS),
    "trees": lambda comm: Planned(comm, TREES),
    "recorded": lambda comm: Recorded(comm, verify=True),
}
"""What stands between the ranks' own communicator and the run."""
