"""Collectives by the operations of a process group's own backend, such as NCCL."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from trainwright.collectives import direct
from trainwright.collectives.calls import Call, Kind, members_by_color
from trainwright.collectives.errors import UsageError
from trainwright.collectives.failures import Failure, FailureBoard
from trainwright.collectives.grad_mode import without_grad
from trainwright.collectives.native_wire import (
    as_carried,
    flat,
    from_wire,
    is_carried,
    to_wire,
    wire_op,
)
from trainwright.collectives.native_work import Finish, NativeWork, wait_for
from trainwright.collectives.protocol import Recv, ReduceOp, Send, Work
from trainwright.collectives.scratch import Scratch
from trainwright.collectives.single import compute_alone
from trainwright.collectives.works import DONE

Started = tuple[list[dist.Work], Finish]


class NativeBackend:
    """One rank's end of a process group, used as it is.

    Args:
        group: the process group.
        device: where tensors live.
        ranks: the members, counted in the world, in the order in which this communicator counts
            them; the group may count them in another.
        name: for messages.
        board: where failures of the world are told.
        is_deterministic: whether contributions are exchanged by messages and combined in the order
            of the ranks, instead of by the backend in an order of its own. Large reductions then
            wait for the peers when they start, on CUDA the stream does. Operations that the
            backend does not have are done so in any case.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        ranks: Sequence[int],
        name: str,
        board: FailureBoard,
        is_deterministic: bool = False,
    ) -> None:
        order = dist.get_process_group_ranks(group)
        self.rank = list(ranks).index(dist.get_rank())
        self.size = len(ranks)
        self.device = device
        self.name = name
        self.ranks = tuple(ranks)
        self.board = board
        self._is_deterministic = is_deterministic
        self._group = group
        self._in_group = [order.index(rank) for rank in ranks]
        # And the other way round: the members in the order of the group, counted here.
        self._from_group = [self._in_group.index(rank) for rank in range(self.size)]
        self._is_in_order = self._in_group == list(range(self.size))
        self._num_splits = 0
        # Only groups that torch itself has made can do that.
        is_plain = type(group) is dist.ProcessGroup
        self._is_coalescing = is_plain and group._get_backend(device).supports_coalescing
        board.watch(self)

    def start(self, call: Call) -> Work:
        """Call the group's operation on a tensor it can carry."""
        self.board.check()
        if self.size == 1:
            compute_alone(call)
            return DONE
        work = NativeWork(self.board, self.name, self.ranks, call, call.timeout_s)
        if _has_elements(call):
            try:
                with without_grad():
                    if call.op is not None and (self._is_deterministic or not is_carried(call)):
                        works, finish = self._start_exchange(call)
                    else:
                        works, finish = _STARTERS[call.kind](self, call)
            except RuntimeError as error:
                raise work.explain(error) from error
            work.start(works, finish, call)
        return work

    def exchange(self, messages: Sequence[Send | Recv], timeout_s: float | None) -> Work:
        """Start one batch; where tags are not carried, the order of each pair decides."""
        self.board.check()
        work = NativeWork(self.board, self.name, self.ranks, "exchange", timeout_s)
        if messages:
            try:
                works = self._batch(messages)
            except RuntimeError as error:
                raise work.explain(error) from error
            work.start(works, None, messages)
        return work

    def start_together(self, pending: Sequence[Call | Sequence[Send | Recv]]) -> list[Work]:
        """Start the collectives in order, then all messages as one batch."""
        messages: list[Send | Recv] = []
        for item in pending:
            if not isinstance(item, Call):
                messages += item
        collectives = [self.start(item) if isinstance(item, Call) else None for item in pending]
        batch = self.exchange(messages, None) if messages else DONE
        return [work if work is not None else batch for work in collectives]

    def split(self, color: int | None, key: int) -> NativeBackend | None:
        """Exchange colors and keys, then make the process groups of all colors on all ranks."""
        if self.size != dist.get_world_size():
            raise UsageError(
                f"split of {self.name!r}, which is a part of the world, is not available yet on "
                "this backend, where all processes must take part; split the whole world instead"
            )
        mine = torch.tensor([0 if color is None else 1, color or 0, key], device=self.device)
        table = mine.new_empty((self.size, 3))
        shape = (1, 3)
        self.start(Call(Kind.ALL_GATHER, table, mine.view(shape), shape, mine.dtype)).wait()
        number = self._num_splits
        self._num_splits += 1
        mine_made = None
        for made_for, members in members_by_color(table.tolist()).items():
            ranks = [self.ranks[rank] for rank in members]
            name = f"{self.name}/{number}.{made_for}"
            backend = dist.get_backend_config(self._group)
            group = dist.new_group(ranks, backend=backend, group_desc=name, sort_ranks=False)
            if made_for == color:
                mine_made = NativeBackend(
                    group, self.device, ranks, name, self.board, self._is_deterministic
                )
        return mine_made

    def abort(self, cause: str) -> None:
        """Tell the world and abort this rank's groups."""
        self.board.publish(Failure(self.board.rank, cause))

    def close(self) -> None:
        """Give up what the group has under way."""
        self._group.abort()

    def _batch(self, messages: Sequence[Send | Recv]) -> list[dist.Work]:
        """Do what ``dist.batch_isend_irecv`` does, with tags."""
        full = [message for message in messages if message.tensor.numel()]
        is_one = self._is_coalescing and full
        if is_one:
            self._group._start_coalescing(self.device)
        works = []
        for message in full:
            post = self._group.send if isinstance(message, Send) else self._group.recv
            peer = self._in_group[message.peer]
            works.append(post([as_carried(message.tensor)], peer, message.tag))
        return [self._group._end_coalescing(self.device)] if is_one else works

    def _start_all_reduce(self, call: Call) -> Started:
        assert call.output is not None
        output = call.output
        wire = to_wire(output, call)
        options = _timed(c10d.AllreduceOptions(), call)
        options.reduceOp = wire_op(call)
        work = self._group.allreduce([wire], options)
        if wire is output and call.op is not ReduceOp.AVG:
            return [work], None
        return [work], lambda: from_wire(output, wire, call, self.size)

    def _start_reduce(self, call: Call) -> Started:
        assert call.output is not None
        output = call.output
        # Backends use the tensors of all ranks as workspace, and ours must stay as they are.
        wire = to_wire(output, call, copy=call.root != self.rank)
        options = _timed(c10d.ReduceOptions(), call)
        options.reduceOp = wire_op(call)
        options.rootRank = self._in_group[call.root or 0]
        work = self._group.reduce([wire], options)
        if call.root != self.rank:
            return [work], None
        return [work], lambda: from_wire(output, wire, call, self.size)

    def _start_reduce_scatter(self, call: Call) -> Started:
        assert call.output is not None
        assert call.input is not None
        output = call.output
        source = call.input
        if not self._is_in_order:
            source = source.view(self.size, -1)[self._from_group]
        wire = to_wire(flat(source), call)
        if wire.dtype is output.dtype:
            result = flat(output)
        else:
            result = wire.new_empty((wire.shape[0] // self.size, *wire.shape[1:]))
        options = _timed(c10d.ReduceScatterOptions(), call)
        options.reduceOp = wire_op(call)
        work = self._group._reduce_scatter_base(result, wire, options)
        return [work], lambda: from_wire(output, result, call, self.size)

    def _start_all_gather(self, call: Call) -> Started:
        assert call.output is not None
        assert call.input is not None
        output = as_carried(call.output)
        staged = output if self._is_in_order else torch.empty_like(output)
        options = _timed(c10d.AllgatherOptions(), call)  # type: ignore[attr-defined]
        work = self._group._allgather_base(staged, as_carried(call.input), options)
        if self._is_in_order:
            return [work], None
        rows = staged.view(self.size, -1)
        return [work], lambda: output.view(self.size, -1).copy_(rows[self._in_group])

    def _start_broadcast(self, call: Call) -> Started:
        assert call.output is not None
        options = _timed(c10d.BroadcastOptions(), call)
        options.rootRank = self._in_group[call.root or 0]
        options.rootTensor = 0
        return [self._group.broadcast([as_carried(call.output)], options)], None

    def _start_barrier(self, call: Call) -> Started:
        options = _timed(c10d.BarrierOptions(), call)
        return [self._group.barrier(options)], None

    def _start_all_to_all(self, call: Call) -> Started:
        if not self._is_in_order:
            return self._start_exchange(call)
        assert call.output is not None
        assert call.input is not None
        output, source = as_carried(call.output), as_carried(call.input)
        # Elements on the way in a row.
        each = math.prod(call.shape) * call.output.element_size() // output.element_size()
        outputs = [rows * each for rows in call.output_splits or ()]
        inputs = [rows * each for rows in call.input_splits or ()]
        options = _timed(c10d.AllToAllOptions(), call)
        return [self._group.alltoall_base(output, source, outputs, inputs, options)], None

    def _start_scatter(self, call: Call) -> Started:
        assert call.output is not None
        options = _timed(c10d.ScatterOptions(), call)
        options.rootRank = self._in_group[call.root or 0]
        parts = [] if call.input is None else [self._rows_by_group(call.input)]
        return [self._group.scatter([as_carried(call.output)], parts, options)], None

    def _start_gather(self, call: Call) -> Started:
        assert call.input is not None
        options = _timed(c10d.GatherOptions(), call)
        options.rootRank = self._in_group[call.root or 0]
        parts = [] if call.output is None else [self._rows_by_group(call.output)]
        return [self._group.gather(parts, [as_carried(call.input)], options)], None

    def _rows_by_group(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Cut a tensor into the parts of the ranks, in the order of the group."""
        rows = as_carried(tensor).view(self.size, -1).unbind(0)
        return [rows[rank] for rank in self._from_group]

    def _start_exchange(self, call: Call) -> Started:
        plan = direct.plan(call, self.rank, self.size, Scratch())
        works = self._batch(_messages(plan.receives, plan.sends))
        if plan.between is not None:
            wait_for(works, call.timeout_s)
            works = self._batch(_messages(plan.late_receives, plan.between()))
        return works, plan.finish


_STARTERS: dict[Kind, Callable[[NativeBackend, Call], Started]] = {
    Kind.ALL_REDUCE: NativeBackend._start_all_reduce,
    Kind.REDUCE: NativeBackend._start_reduce,
    Kind.REDUCE_SCATTER: NativeBackend._start_reduce_scatter,
    Kind.ALL_GATHER: NativeBackend._start_all_gather,
    Kind.ALL_TO_ALL: NativeBackend._start_all_to_all,
    Kind.BROADCAST: NativeBackend._start_broadcast,
    Kind.SCATTER: NativeBackend._start_scatter,
    Kind.GATHER: NativeBackend._start_gather,
    Kind.BARRIER: NativeBackend._start_barrier,
}


def _messages(receives: Sequence[direct.Part], sends: Sequence[direct.Part]) -> list[Send | Recv]:
    return [
        *(Recv(tensor, peer) for peer, tensor in receives),
        *(Send(tensor, peer) for peer, tensor in sends),
    ]


def _has_elements(call: Call) -> bool:
    # The shape of an all_to_all is that of a row: there may be many here and none there.
    return 0 not in call.shape


def _timed(options: Any, call: Call) -> Any:
    if call.timeout_s is not None:
        options.timeout = timedelta(seconds=call.timeout_s)
    return options
