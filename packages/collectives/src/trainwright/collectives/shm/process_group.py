"""A process group of torch.distributed whose methods are the operations of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import ReduceOp, Work
from trainwright.collectives.shm.communicator import SharedMemoryCommunicator
from trainwright.collectives.works import JoinedWork

Tensors = Sequence[torch.Tensor]

# torch declares several signatures a method for callers; implementations are called with the first.
_ProcessGroup: Any = dist.ProcessGroup

_OPS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.AVG,
    "PRODUCT": ReduceOp.PRODUCT,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "BAND": ReduceOp.BITWISE_AND,
    "BOR": ReduceOp.BITWISE_OR,
    "BXOR": ReduceOp.BITWISE_XOR,
}


class TorchWork(dist.Work):
    """The handle that torch.distributed gives to its callers."""

    def __init__(self, work: Work, results: Any, finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._work = work
        self._results = results
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Take part until the operation is over."""
        self._work.wait(_seconds(timeout))
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True

    def is_completed(self) -> bool:
        """Whether waiting would not block."""
        return self._work.is_done()

    def is_success(self) -> bool:
        """Whether the operation is over."""
        return self._work.is_done()

    def result(self) -> Any:
        """Return the tensors that were written."""
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, then return a future that has its result: nobody else would complete it."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future


class _Group(_ProcessGroup):  # type: ignore[misc]
    """What torch.distributed asks of any group."""

    def __init__(self, comm: SharedMemoryCommunicator) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm

    def size(self) -> int:
        """Return the number of ranks."""
        return self._comm.size

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name for messages of torch."""
        return "shm"

    @property
    def group_name(self) -> str:
        """The name under which torch.distributed keeps the group."""
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def pg_name(self) -> str:
        """The same, where torch asks for it so."""
        return self.group_name

    def __repr__(self) -> str:
        """Name the communicator."""
        return f"ShmProcessGroup({self._comm!r})"

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> TorchWork:
        """Send a tensor."""
        return TorchWork(self._comm.send(tensors[0].detach(), peer, tag), list(tensors))

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> TorchWork:
        """Receive a tensor."""
        return TorchWork(self._comm.recv(tensors[0].detach(), peer, tag), list(tensors))

    def barrier(self, opts: Any = None) -> TorchWork:
        """Wait until all ranks have come."""
        token = torch.zeros(1, dtype=torch.int32)
        return TorchWork(self._comm.all_reduce(token, timeout_s=_timeout(opts)), [])

    def abort(self) -> None:
        """Make the peers' operations raise."""
        self._comm.abort("the process group was aborted")


class _Combining(_Group):
    """The operations that combine what ranks contribute."""

    def allreduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        """Combine each tensor in place."""
        op, timeout_s = _op(opts), _timeout(opts)
        works = [self._comm.all_reduce(t.detach(), op, timeout_s=timeout_s) for t in tensors]
        return TorchWork(_join(works), list(tensors))

    def reduce(self, tensors: Tensors, opts: Any) -> TorchWork:
        """Combine a tensor on one rank."""
        tensor = tensors[0].detach()
        work = self._comm.reduce(tensor, opts.rootRank, _op(opts), timeout_s=_timeout(opts))
        return TorchWork(work, list(tensors))

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> TorchWork:
        """Combine the ranks' tensors and keep this rank's part."""
        flat = _flat("reduce_scatter", output)
        work = self._comm.reduce_scatter(
            flat, _flat_copy(input), _op(opts), timeout_s=_timeout(opts)
        )
        return TorchWork(work, output)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> TorchWork:
        """Combine lists of tensors of equal size and keep this rank's tensor."""
        source = torch.cat([_flat_copy(part) for part in inputs[0]])
        output = outputs[0].detach().view(-1) if outputs[0].is_contiguous() else outputs[0].detach()
        flat = torch.empty_like(source[: output.numel()])
        work = self._comm.reduce_scatter(flat, source, _op(opts), timeout_s=_timeout(opts))
        return TorchWork(work, list(outputs), lambda: _copy_all([output], [flat]))

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> TorchWork:
        """Combine and keep parts, several times."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.reduce_scatter_single(output, input, opts)._work for output, input in pairs]
        return TorchWork(_join(works), list(outputs))

    # The same under the names that older callers use.
    allreduce_coalesced = allreduce
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


class ShmProcessGroup(_Combining):
    """A process group over a `SharedMemoryCommunicator`."""

    def broadcast(self, tensors: Tensors, opts: Any) -> TorchWork:
        """Copy a tensor of one rank to all."""
        work = self._comm.broadcast(tensors[0].detach(), opts.rootRank, timeout_s=_timeout(opts))
        return TorchWork(work, list(tensors))

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> TorchWork:
        """Concatenate the ranks' tensors."""
        flat = _flat("all_gather", output)
        work = self._comm.all_gather(flat, _flat_copy(input), timeout_s=_timeout(opts))
        return TorchWork(work, output)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        """Gather the ranks' tensors of equal size into a list."""
        source = _flat_copy(inputs[0])
        flat = source.new_empty(self._comm.size * source.numel())
        work = self._comm.all_gather(flat, source, timeout_s=_timeout(opts))
        parts = flat.tensor_split(self._comm.size)
        return TorchWork(work, list(outputs), lambda: _copy_all(outputs[0], parts))

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> TorchWork:
        """Concatenate the ranks' tensors, several times."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.all_gather_single(output, input, opts)._work for output, input in pairs]
        return TorchWork(_join(works), list(outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Exchange parts along dim 0."""
        work = self._comm.all_to_all(
            output.detach(),
            input.detach(),
            output_splits or None,
            input_splits or None,
            timeout_s=_timeout(opts),
        )
        return TorchWork(work, output)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        """Exchange lists of tensors."""
        source = torch.cat([_flat_copy(part) for part in inputs])
        outs = [part.numel() for part in outputs]
        flat = source.new_empty(sum(outs))
        ins = [part.numel() for part in inputs]
        work = self._comm.all_to_all(flat, source, outs, ins, timeout_s=_timeout(opts))
        return TorchWork(work, list(outputs), lambda: _copy_all(outputs, torch.split(flat, outs)))

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> TorchWork:
        """Gather tensors of equal size into a list on one rank."""
        source = _flat_copy(inputs[0])
        root = opts.rootRank
        if self._comm.rank != root:
            return TorchWork(self._comm.gather(None, source, root), [])
        flat = source.new_empty(self._comm.size * source.numel())
        work = self._comm.gather(flat, source, root, timeout_s=_timeout(opts))
        parts = flat.tensor_split(self._comm.size)
        return TorchWork(work, list(outputs), lambda: _copy_all(outputs[0], parts))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> TorchWork:
        """Give each rank one tensor of a list."""
        output = outputs[0].detach()
        flat = output.new_empty(output.numel())
        source = None
        if self._comm.rank == opts.rootRank:
            source = torch.cat([_flat_copy(part) for part in inputs[0]])
        work = self._comm.scatter(flat, source, opts.rootRank, timeout_s=_timeout(opts))
        return TorchWork(work, list(outputs), lambda: _copy_all([output], [flat]))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


def _op(opts: Any) -> ReduceOp:
    if opts is None:
        return ReduceOp.SUM
    name = str(getattr(opts.reduceOp, "op", opts.reduceOp)).rsplit(".", 1)[-1]
    if name not in _OPS:
        raise UsageError(f"shared memory has no {name}; there are {', '.join(_OPS)}")
    return _OPS[name]


def _timeout(opts: Any) -> float | None:
    return None if opts is None else _seconds(opts.timeout)


def _seconds(timeout: timedelta | None) -> float | None:
    """Return seconds; torch writes "no limit of its own" as a time of zero or less."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return seconds if seconds > 0 else None


def _join(works: Sequence[Work]) -> Work:
    return works[0] if len(works) == 1 else JoinedWork(works)


def _flat(what: str, output: torch.Tensor) -> torch.Tensor:
    if not output.is_contiguous():
        raise UsageError(f"{what}: the output is written in order and must be contiguous")
    return output.detach().view(-1)


def _flat_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1)


def _copy_all(targets: Tensors, sources: Tensors) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.view(target.shape))
