"""What one rank does in each collective, step by step; it yields where it waits for the others.

Small tensors, and those that few ranks read, are shown whole: every rank copies its contribution
into its segment, or has it there already, and reads those of the others. What lies in shared memory
already is not copied, but belongs to the operation until everybody has read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from trainwright.collectives.calls import Call, Kind
from trainwright.collectives.errors import UsageError
from trainwright.collectives.shm import pieces
from trainwright.collectives.shm.operation import Steps, copy
from trainwright.collectives.shm.table import OFFSET, POSTED, encode

if TYPE_CHECKING:
    from trainwright.collectives.shm.group import ShmBackend

# Below this, a copy is cheaper than waiting until everybody has read the original.
_DIRECT_BYTES = 1 << 15
_WORD_BYTES = 8


def take_part(group: ShmBackend, call: Call, number: int) -> Steps:
    """Yield until the collective is over for this rank."""
    table = group.table
    while not table.is_free(number):
        yield
    group.collect()
    if pieces.are_worth_it(call):
        yield from pieces.take_part(group, call, number)
        return
    source = _shown(call, group.rank)
    # The others would read what an all-reduce has already written.
    may_be_direct = call.kind is not Kind.ALL_REDUCE
    offset, is_direct = (0, False)
    if source is not None:
        offset, is_direct = _show(group, source, number, may_be_direct)
    if call.kind is Kind.ALL_TO_ALL:
        offset = _show_splits(group, call, number, offset)
    table.post(number, encode(call), offset, int(is_direct))
    table.tell(POSTED, number, number + 1)
    while not table.are_posted(number):
        yield
    table.check_agreement(number)
    compute = _COMPUTE.get(call.kind)
    if compute is not None:
        compute(group, call, number)
    table.finish(number)
    if is_direct:
        while not table.are_finished(number):
            yield


def _shown(call: Call, rank: int) -> torch.Tensor | None:
    """Return what others read of this rank."""
    kind = call.kind
    if kind in (Kind.BROADCAST, Kind.SCATTER):
        return call.input if rank == call.root else None
    if kind in (Kind.REDUCE, Kind.GATHER):
        return None if rank == call.root else call.input
    return call.input


def _show(
    group: ShmBackend, source: torch.Tensor, number: int, may_be_direct: bool
) -> tuple[int, bool]:
    """Return where the others find the tensor, and whether that is the tensor itself."""
    num_bytes = source.nbytes
    own = group.domain.own
    if may_be_direct and num_bytes > _DIRECT_BYTES:
        found = own.find(source)
        if found is not None:
            return found, True
    offset = group.take(number, num_bytes)
    own.view(offset, source.numel(), source.dtype).copy_(source.view(-1))
    return offset, False


def _show_splits(group: ShmBackend, call: Call, number: int, offset: int) -> int:
    assert call.input_splits is not None
    assert call.output_splits is not None
    block = group.take(number, _WORD_BYTES * (1 + 2 * group.size))
    words = group.domain.own.words
    first = block // _WORD_BYTES
    for place, value in enumerate((offset, *call.input_splits, *call.output_splits), first):
        words[place] = value
    return block


def _parts(
    group: ShmBackend, call: Call, number: int, start: int, numel: int
) -> list[torch.Tensor]:
    """Return the same elements of every rank's input."""
    assert call.input is not None
    dtype = call.input.dtype
    made = []
    for rank, segment in enumerate(group.segments):
        if rank == group.rank:
            own = call.input.view(-1)
            made.append(own if numel == own.numel() else own[start : start + numel])
        else:
            offset = group.table.read(rank, OFFSET, number) + start * dtype.itemsize
            made.append(segment.view(offset, numel, dtype))
    return made


def _combine(group: ShmBackend, call: Call, number: int) -> None:
    assert call.output is not None
    assert call.op is not None
    assert call.reduce_dtype is not None
    if call.kind is Kind.REDUCE and group.rank != call.root:
        return
    output = call.output.view(-1)
    numel = output.numel()
    start = numel * group.rank if call.kind is Kind.REDUCE_SCATTER else 0
    parts = _parts(group, call, number, start, numel)
    group.domain.combiner.combine([output], parts, call.op, call.reduce_dtype)


def _gather(group: ShmBackend, call: Call, number: int) -> None:
    if call.output is None:
        return
    assert call.input is not None
    numel = call.input.numel()
    output = call.output.view(-1)
    for rank, part in enumerate(_parts(group, call, number, 0, numel)):
        copy(output[rank * numel : (rank + 1) * numel], part)


def _take_from_root(group: ShmBackend, call: Call, number: int) -> None:
    assert call.output is not None
    root = call.root or 0
    output = call.output.view(-1)
    start = output.numel() * group.rank if call.kind is Kind.SCATTER else 0
    if group.rank != root:
        offset = group.table.read(root, OFFSET, number) + start * output.dtype.itemsize
        output.copy_(group.segments[root].view(offset, output.numel(), output.dtype))
    elif call.kind is Kind.SCATTER:
        assert call.input is not None
        copy(output, call.input.view(-1)[start : start + output.numel()])


def _all_to_all(group: ShmBackend, call: Call, number: int) -> None:
    assert call.input is not None
    assert call.output is not None
    size = group.size
    tables = []
    for rank, segment in enumerate(group.segments):
        first = group.table.read(rank, OFFSET, number) // _WORD_BYTES
        tables.append(list(segment.words[first : first + 1 + 2 * size]))
    _check_splits(group, tables, number)
    row = 1
    for length in call.shape:
        row *= length
    outputs = torch.split(call.output, call.output_splits or 0)
    for rank, segment in enumerate(group.segments):
        offset, *splits = tables[rank]
        before = sum(splits[: group.rank]) * row
        output = outputs[rank].view(-1)
        if rank == group.rank:
            output.copy_(call.input.view(-1)[before : before + output.numel()])
        elif output.numel():
            start = offset + before * output.dtype.itemsize
            output.copy_(segment.view(start, output.numel(), output.dtype))


def _check_splits(group: ShmBackend, tables: list[list[int]], number: int) -> None:
    size = group.size
    for sender in range(size):
        for receiver in range(size):
            offered = tables[sender][1 + receiver]
            expected = tables[receiver][1 + size + sender]
            if offered != expected:
                group.table.finish(number)
                group.domain.ring()
                raise UsageError(
                    f"all_to_all: rank {sender} sends {offered} rows to rank {receiver}, which "
                    f"expects {expected}; input_splits[{receiver}] on rank {sender} and "
                    f"output_splits[{sender}] on rank {receiver} must be equal"
                )


_COMPUTE: dict[Kind, Callable[[ShmBackend, Call, int], None]] = {
    Kind.ALL_REDUCE: _combine,
    Kind.REDUCE: _combine,
    Kind.REDUCE_SCATTER: _combine,
    Kind.ALL_GATHER: _gather,
    Kind.GATHER: _gather,
    Kind.BROADCAST: _take_from_root,
    Kind.SCATTER: _take_from_root,
    Kind.ALL_TO_ALL: _all_to_all,
}
