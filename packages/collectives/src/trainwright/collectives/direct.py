"""Collectives as messages between every two ranks, with sums in rank order.

A plan has at most two rounds. Receives of both rounds are posted when the operation starts; the
sends of the second need what the first has brought. No round waits for a peer to *finish*
anything, only for it to have started the same operation, so that operations of different groups
cannot block each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from trainwright.collectives.arithmetic import combine
from trainwright.collectives.calls import Call, Kind

Part = tuple[int, torch.Tensor]

# Above this many extra bytes a rank, two rounds beat sending everything to everybody.
_TWO_ROUNDS_BYTES = 1 << 18


@attrs.define(slots=True, eq=False)
class Plan:
    """What one rank has to send, receive and compute; peers paired with flat tensors."""

    receives: list[Part] = attrs.Factory(list)
    sends: list[Part] = attrs.Factory(list)
    late_receives: list[Part] = attrs.Factory(list)
    between: Callable[[], list[Part]] | None = None
    finish: Callable[[], None] | None = None


def plan(call: Call, rank: int, size: int) -> Plan:
    """Return this rank's part of a collective of ``size >= 2`` ranks."""
    return _PLANS[call.kind](call, rank, size)


def _plan_all_reduce(call: Call, rank: int, size: int) -> Plan:
    data = _flat(call.output)
    if data.nbytes * (size - 2) <= _TWO_ROUNDS_BYTES:
        return _combine_whole(call, data, [data], rank, size, receivers=range(size))
    return _combine_by_chunks(call, data, rank, size, receivers=range(size))


def _plan_reduce(call: Call, rank: int, size: int) -> Plan:
    root = call.root or 0
    data = _flat(call.output)
    if data.nbytes * (size - 2) <= _TWO_ROUNDS_BYTES:
        return _combine_whole(call, data, [data], rank, size, receivers=(root,))
    return _combine_by_chunks(call, data, rank, size, receivers=(root,))


def _plan_reduce_scatter(call: Call, rank: int, size: int) -> Plan:
    rows = _rows(call.input, size)
    scratch = torch.empty_like(rows)
    return Plan(
        receives=[(peer, scratch[peer]) for peer in _before(rank, size)],
        sends=[(peer, rows[peer]) for peer in _after(rank, size)],
        finish=partial(_combine_rows, call, [_flat(call.output)], scratch, rows[rank], rank),
    )


def _plan_all_gather(call: Call, rank: int, size: int) -> Plan:
    rows = _rows(call.output, size)
    own = _flat(call.input)
    _copy(rows[rank], own)
    return Plan(
        receives=[(peer, rows[peer]) for peer in _before(rank, size)],
        sends=[(peer, own) for peer in _after(rank, size)],
    )


def _plan_all_to_all(call: Call, rank: int, size: int) -> Plan:
    assert call.output is not None
    assert call.input is not None
    outputs = torch.split(call.output, call.output_splits or 0)
    inputs = torch.split(call.input, call.input_splits or 0)
    _copy(outputs[rank], inputs[rank])
    return Plan(
        receives=[(peer, outputs[peer]) for peer in _before(rank, size)],
        sends=[(peer, inputs[peer]) for peer in _after(rank, size)],
    )


def _plan_broadcast(call: Call, rank: int, size: int) -> Plan:
    root = call.root or 0
    data = _flat(call.output)
    if data.nbytes * (size - 2) <= _TWO_ROUNDS_BYTES:
        if rank == root:
            return Plan(sends=[(peer, data) for peer in _after(rank, size)])
        return Plan(receives=[(root, data)])
    chunks = data.tensor_split(size)
    if rank == root:
        # The root's own chunk goes to everybody in round one: nobody else can forward it.
        return Plan(
            sends=[(peer, chunks[peer]) for peer in _after(rank, size)],
            between=lambda: [(peer, chunks[root]) for peer in _after(rank, size)],
        )
    others = [peer for peer in _after(rank, size) if peer != root]
    return Plan(
        receives=[(root, chunks[rank])],
        late_receives=[(peer, chunks[peer]) for peer in _before(rank, size)],
        between=lambda: [(peer, chunks[rank]) for peer in others],
    )


def _plan_scatter(call: Call, rank: int, size: int) -> Plan:
    root = call.root or 0
    output = _flat(call.output)
    if rank != root:
        return Plan(receives=[(root, output)])
    rows = _rows(call.input, size)
    _copy(output, rows[rank])
    return Plan(sends=[(peer, rows[peer]) for peer in _after(rank, size)])


def _plan_gather(call: Call, rank: int, size: int) -> Plan:
    root = call.root or 0
    own = _flat(call.input)
    if rank != root:
        return Plan(sends=[(root, own)])
    rows = _rows(call.output, size)
    _copy(rows[rank], own)
    return Plan(receives=[(peer, rows[peer]) for peer in _before(rank, size)])


def _plan_barrier(call: Call, rank: int, size: int) -> Plan:
    token = torch.zeros(1, dtype=torch.uint8)
    arrived = torch.empty(size, dtype=torch.uint8)
    return Plan(
        receives=[(peer, arrived[peer : peer + 1]) for peer in _before(rank, size)],
        sends=[(peer, token) for peer in _after(rank, size)],
    )


_PLANS: dict[Kind, Callable[[Call, int, int], Plan]] = {
    Kind.ALL_REDUCE: _plan_all_reduce,
    Kind.REDUCE: _plan_reduce,
    Kind.REDUCE_SCATTER: _plan_reduce_scatter,
    Kind.ALL_GATHER: _plan_all_gather,
    Kind.ALL_TO_ALL: _plan_all_to_all,
    Kind.BROADCAST: _plan_broadcast,
    Kind.SCATTER: _plan_scatter,
    Kind.GATHER: _plan_gather,
    Kind.BARRIER: _plan_barrier,
}


def _combine_whole(
    call: Call,
    data: torch.Tensor,
    outputs: list[torch.Tensor],
    rank: int,
    size: int,
    receivers: Sequence[int],
) -> Plan:
    made = Plan(sends=[(peer, data) for peer in _after(rank, size) if peer in receivers])
    if rank in receivers:
        scratch = data.new_empty((size, data.numel()))
        made.receives = [(peer, scratch[peer]) for peer in _before(rank, size)]
        made.finish = partial(_combine_rows, call, outputs, scratch, data, rank)
    return made


def _combine_by_chunks(
    call: Call, data: torch.Tensor, rank: int, size: int, receivers: Sequence[int]
) -> Plan:
    chunks = data.tensor_split(size)
    own = chunks[rank]
    scratch = data.new_empty((size, own.numel()))
    result = own if rank in receivers else torch.empty_like(own)

    def between() -> list[Part]:
        _combine_rows(call, [result], scratch, own, rank)
        return [(peer, result) for peer in _after(rank, size) if peer in receivers]

    # A peer sends its chunk of the result only after it has received ours, so the late receives
    # may write where the first round reads.
    is_receiver = rank in receivers
    return Plan(
        receives=[(peer, scratch[peer]) for peer in _before(rank, size)],
        sends=[(peer, chunks[peer]) for peer in _after(rank, size)],
        late_receives=[(peer, chunks[peer]) for peer in _before(rank, size) if is_receiver],
        between=between,
    )


def _combine_rows(
    call: Call, outputs: Sequence[torch.Tensor], rows: torch.Tensor, own: torch.Tensor, rank: int
) -> None:
    assert call.op is not None
    assert call.reduce_dtype is not None
    parts = list(rows.unbind(0))
    parts[rank] = own
    combine(outputs, parts, call.op, call.reduce_dtype)


def _flat(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.view(-1)


def _rows(tensor: torch.Tensor | None, size: int) -> torch.Tensor:
    assert tensor is not None
    return tensor.view(size, tensor.numel() // size)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _after(rank: int, size: int) -> list[int]:
    return [(rank + step) % size for step in range(1, size)]


def _before(rank: int, size: int) -> list[int]:
    return [(rank - step) % size for step in range(1, size)]
