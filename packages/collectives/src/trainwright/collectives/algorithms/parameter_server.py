"""Parameter servers: some ranks keep parameters and optimizer states, the others compute gradients.

The first ``s`` ranks are servers and each keeps its chunk of the flattened parameters, in at least
float32, with the optimizer's states for it; the ``w`` other ranks are workers and keep no states.
``K`` is the size of all parameters. In a step, a worker pushes its gradients and pulls new
parameters (`ServedParameters`): it sends ``K`` in ``s`` messages and receives as much; a server
receives and sends ``w * K / s`` in ``w`` messages each, so that one server's link carries
``2 * w * K``.

Synchronous servers update with the mean of all workers' gradients. With bounded staleness they
update with each gradient as it comes, and a worker waits only where it would get further ahead of
the slowest one than the bound.

Source: Li et al.: Scaling distributed machine learning with the parameter server (OSDI 2014); Ho et
al.: More effective distributed ML via a stale synchronous parallel parameter server (NIPS 2013).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
import torch
from torch import nn

from trainwright.collectives.algorithms.server_roles import ServerRoles
from trainwright.collectives.arithmetic import combine
from trainwright.collectives.checks import check_timeout, resolve_reduce_dtype
from trainwright.collectives.errors import CollectiveTimeoutError, UsageError
from trainwright.collectives.protocol import Communicator, Recv, ReduceOp, Send, Work

# How long a server looks for one worker's gradient before it looks for the others' again.
_GLANCE_S = 0.001
# They look at more than one element at a time, so a flat chunk is not what they expect.
_NOT_BY_ELEMENT = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


@attrs.frozen
class StaleReport:
    """What happened while a server updated with gradients as they came."""

    num_updates: int
    """One for each gradient."""
    largest_lead: int
    """How many steps a worker had done more than the slowest one when it went on; at most the
    bound."""
    largest_lag: int
    """How many updates by other workers a gradient had not seen yet."""
    num_held: int
    """How often a worker had to wait for a slower one."""


class ParameterServer:
    """One server's chunk of the parameters, and the optimizer that updates it.

    ``chunk`` is the flat parameter and ``optimizer`` what ``make_optimizer`` made of it; both may
    be saved, loaded and changed between two calls of `serve`.

    Args:
        comm: Servers and workers.
        roles: Which is which.
        numel: How many elements all parameters together have.
        dtype: Dtype of the workers' parameters and gradients.
        make_optimizer: Makes the optimizer of a list of parameters; it is given the one flat chunk
            (at least float32), so it must work element by element.
        timeout_s: How long it waits for the workers before it gives up.

    Raises:
        UsageError: This rank is a worker, there are more servers than elements, the dtype is not
            that of floating-point numbers, or the optimizer does not work by elements.

    Communicates:
        Receives its chunk's first values from the first worker and sends them to all, while these
        make their `ServedParameters`: ``K / s`` in one message, and in ``w``.
    """

    def __init__(
        self,
        comm: Communicator,
        roles: ServerRoles,
        numel: int,
        dtype: torch.dtype,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        timeout_s: float = 600.0,
    ) -> None:
        what = "ParameterServer"
        roles.check(what, comm, roles.servers, "ServedParameters")
        check_timeout(what, timeout_s)
        wide = resolve_reduce_dtype(what, dtype, ReduceOp.AVG, None)
        bounds = roles.bounds(numel)
        self._comm = comm
        self._workers = roles.workers
        self._dtype = dtype
        self._timeout_s = timeout_s
        own = bounds[comm.rank + 1] - bounds[comm.rank]
        self.chunk = nn.Parameter(torch.zeros(own, dtype=wide, device=comm.device))
        self.optimizer = make_optimizer([self.chunk])
        _check_optimizer(self.optimizer)
        values = self._new_buffer()
        comm.recv(values, self._workers[0], timeout_s=timeout_s).wait()
        with torch.no_grad():
            self.chunk.copy_(values)
        self._publish()

    def serve(self, num_steps: int) -> None:
        """Do steps of all workers together, each with the mean of their gradients.

        Gradients are added in rank order, in at least float32.

        Communicates:
            In each step ``w`` messages of ``K / s`` from the workers, and as many to them.
        """
        mean = torch.empty_like(self.chunk, requires_grad=False)
        for _ in range(num_steps):
            gradients = {worker: self._new_buffer() for worker in self._workers}
            receives = [Recv(gradient, worker) for worker, gradient in gradients.items()]
            self._comm.exchange(receives, timeout_s=self._timeout_s).wait()
            combine([mean], list(gradients.values()), ReduceOp.AVG, mean.dtype)
            self._update(mean)
            self._publish()

    def serve_stale(self, num_steps: int, bound: int) -> StaleReport:
        """Do ``num_steps`` steps of each worker, updating with each gradient as it comes.

        A worker that has done k steps gets new parameters once the slowest has done ``k - bound``.
        Each gradient makes a whole update, so that ``w`` workers make ``w`` times as many as in
        `serve`.

        Raises:
            UsageError: ``bound`` is negative.
            CollectiveTimeoutError: No gradient came in time; it names the workers that were
                awaited.

        Communicates:
            For each step of each worker a message of ``K / s`` from it, and one to it.
        """
        if bound < 0:
            raise UsageError(f"serve_stale: bound={bound} must be a number of steps, at least 0")
        return _StaleRun(self, num_steps, bound).run()

    def _new_buffer(self) -> torch.Tensor:
        return torch.empty(self.chunk.numel(), dtype=self._dtype, device=self._comm.device)

    def _update(self, gradient: torch.Tensor) -> None:
        self.chunk.grad = gradient.to(self.chunk.dtype)
        self.optimizer.step()
        self.chunk.grad = None

    def _values(self) -> torch.Tensor:
        # A copy: the next update may come before this has arrived everywhere.
        return self.chunk.detach().to(self._dtype, copy=True)

    def _publish(self) -> None:
        values = self._values()
        sends = [Send(values, worker) for worker in self._workers]
        self._comm.exchange(sends, timeout_s=self._timeout_s).wait()


class _StaleRun:
    """One call of `ParameterServer.serve_stale`; counts steps and updates by worker."""

    def __init__(self, server: ParameterServer, num_steps: int, bound: int) -> None:
        self._server = server
        self._num_steps = num_steps
        self._bound = bound
        self._done = dict.fromkeys(server._workers, 0)
        self._seen = dict.fromkeys(server._workers, 0)
        self._incoming: dict[int, tuple[torch.Tensor, Work]] = {}
        self._outgoing: dict[int, Work] = {}
        self._waiting: list[int] = []
        self._leads = [0]
        self._lags = [0]
        self._num_held = 0

    def run(self) -> StaleReport:
        """Serve until all workers have done all steps."""
        if self._num_steps > 0:
            for worker in self._done:
                self._expect(worker)
        while self._incoming:
            worker = self._next()
            gradient, work = self._incoming.pop(worker)
            work.wait()
            self._lags.append(sum(self._done.values()) - self._seen[worker])
            self._server._update(gradient)
            self._done[worker] += 1
            self._waiting.append(worker)
            self._let_go()
            self._num_held += worker in self._waiting
        for work in self._outgoing.values():
            work.wait()
        num_updates = sum(self._done.values())
        return StaleReport(num_updates, max(self._leads), max(self._lags), self._num_held)

    def _expect(self, worker: int) -> None:
        gradient = self._server._new_buffer()
        work = self._server._comm.recv(gradient, worker, timeout_s=self._server._timeout_s)
        self._incoming[worker] = (gradient, work)

    def _next(self) -> int:
        """Return a worker whose gradient has come."""
        deadline = time.monotonic() + self._server._timeout_s
        while time.monotonic() < deadline:
            for worker, (_, work) in self._incoming.items():
                if work.is_done():
                    return worker
            _, first = next(iter(self._incoming.values()))
            first.is_done(_GLANCE_S)
        missing = sorted(self._incoming)
        raise CollectiveTimeoutError(
            f"serve_stale: no gradient came within {self._server._timeout_s:g} s; missing: ranks "
            f"{missing} of {self._server._comm.name!r}, which have done "
            f"{[self._done[worker] for worker in missing]} of {self._num_steps} steps"
        )

    def _let_go(self) -> None:
        """Give parameters to all who are not too far ahead of the slowest."""
        slowest = min(self._done.values())
        for worker in list(self._waiting):
            lead = self._done[worker] - slowest
            if lead > self._bound:
                continue
            self._waiting.remove(worker)
            self._leads.append(lead)
            self._seen[worker] = sum(self._done.values())
            if worker in self._outgoing:
                self._outgoing.pop(worker).wait()
            values = self._server._values()
            timeout_s = self._server._timeout_s
            self._outgoing[worker] = self._server._comm.send(values, worker, timeout_s=timeout_s)
            if self._done[worker] < self._num_steps:
                self._expect(worker)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    found = sorted(names & _NOT_BY_ELEMENT)
    if found:
        raise UsageError(
            f"ParameterServer: {found[0]} needs whole matrices, and servers keep flat chunks "
            "of all parameters; use an optimizer that works element by element, such as AdamW"
        )
