"""The worker's side of parameter servers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from trainwright.collectives.algorithms.server_roles import ServerRoles
from trainwright.collectives.checks import check_tensor, check_timeout, check_writable
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Communicator, Recv, Send, Work


class ServedParameters:
    """The parameters of a worker, which `ParameterServer` ranks keep and update.

    Args:
        comm: Servers and workers.
        roles: Which is which.
        parameters: The worker's parameters, of one dtype, in the same order on all workers. All
            begin with the values of the first worker.
        timeout_s: How long it waits for the servers before it gives up.

    Raises:
        UsageError: This rank is a server, there are more servers than elements, or the parameters
            differ in dtype or cannot be written to.

    Communicates:
        The first worker sends ``K`` in ``s`` messages, and every worker receives as much.
    """

    def __init__(
        self,
        comm: Communicator,
        roles: ServerRoles,
        parameters: Sequence[torch.Tensor],
        *,
        timeout_s: float = 600.0,
    ) -> None:
        what = "ServedParameters"
        roles.check(what, comm, roles.workers, "ParameterServer")
        check_timeout(what, timeout_s)
        for parameter in parameters:
            check_writable(what, check_tensor(what, parameter, comm.device))
        if len({parameter.dtype for parameter in parameters}) != 1:
            raise UsageError(
                f"{what}: parameters must be of one dtype, got "
                f"{sorted({str(p.dtype) for p in parameters})}; serve each dtype by itself"
            )
        self._comm = comm
        self._servers = roles.servers
        self._parameters = tuple(parameters)
        self._bounds = roles.bounds(sum(parameter.numel() for parameter in parameters))
        self._timeout_s = timeout_s
        self._pushed: tuple[torch.Tensor, Work] | None = None
        if comm.rank == roles.workers[0]:
            self._push([parameter.detach() for parameter in parameters])
            self._finish_push()
        self._receive()

    def step(self) -> None:
        """Push the gradients and pull the parameters that they led to."""
        self.push()
        self.pull()

    def push(self) -> None:
        """Start sending each parameter's ``grad``, zeros where it has none.

        The gradients may be changed at once; they were copied.

        Raises:
            UsageError: The last push has not been followed by a pull.

        Communicates:
            ``K`` in ``s`` messages.
        """
        if self._pushed is not None:
            raise UsageError("push: servers answer each push, so call pull() before the next one")
        self._push([p.new_zeros(p.shape) if p.grad is None else p.grad for p in self._parameters])

    def pull(self) -> None:
        """Wait for the parameters that the servers answer the last push with.

        Raises:
            UsageError: There was no push, so that no answer will come.

        Communicates:
            Receives ``K`` in ``s`` messages.
        """
        if self._pushed is None:
            raise UsageError("pull: servers answer a push, so call push() first")
        self._finish_push()
        self._receive()

    def _push(self, tensors: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sends = [Send(chunk, server) for server, chunk in self._chunks(flat)]
        self._pushed = (flat, self._comm.exchange(sends, timeout_s=self._timeout_s))

    def _finish_push(self) -> None:
        assert self._pushed is not None
        self._pushed[1].wait()
        self._pushed = None

    def _receive(self) -> None:
        first = self._parameters[0]
        flat = torch.empty(self._bounds[-1], dtype=first.dtype, device=first.device)
        receives = [Recv(chunk, server) for server, chunk in self._chunks(flat)]
        self._comm.exchange(receives, timeout_s=self._timeout_s).wait()
        with torch.no_grad():
            parts = torch.split(flat, [parameter.numel() for parameter in self._parameters])
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.copy_(part.view(parameter.shape))

    def _chunks(self, flat: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        pairs = itertools.pairwise(self._bounds)
        return [
            (s, flat[start:stop]) for s, (start, stop) in zip(self._servers, pairs, strict=True)
        ]
