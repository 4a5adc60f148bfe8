"""What one collective among threads has to do, as a list of independent tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from trainwright.collectives.arithmetic import combine
from trainwright.collectives.calls import Call, Kind
from trainwright.collectives.errors import UsageError

Task = Callable[[], None]

_SMALL_BYTES = 1 << 19

# What is combined as one task, where tasks are shared between threads.
_CHUNK = 1 << 16


def is_large(calls: Sequence[Call]) -> bool:
    """Whether sharing the work is worth waking the others for."""
    total = 0
    for call in calls:
        if call.input is not None:
            total += call.input.nbytes
    return total > _SMALL_BYTES


def plan(calls: Sequence[Call]) -> list[Task]:
    """Return tasks that may run in any order and at once; all calls agree on what they are."""
    return _PLANS[calls[0].kind](calls)


def _plan_all_reduce(calls: Sequence[Call]) -> list[Task]:
    return _combine_tasks(calls[0], _inputs(calls), _outputs(calls))


def _plan_reduce(calls: Sequence[Call]) -> list[Task]:
    root = calls[0].root or 0
    return _combine_tasks(calls[0], _inputs(calls), _outputs([calls[root]]))


def _plan_reduce_scatter(calls: Sequence[Call]) -> list[Task]:
    inputs = [part.view(len(calls), -1) if part.numel() else part for part in _inputs(calls)]
    tasks: list[Task] = []
    for rank, output in enumerate(_outputs(calls)):
        if output.numel():
            tasks += _combine_tasks(calls[0], [part[rank] for part in inputs], [output])
    return tasks


def _plan_all_gather(calls: Sequence[Call]) -> list[Task]:
    inputs = _inputs(calls)
    return [
        partial(_place, output, inputs, own=rank) for rank, output in enumerate(_outputs(calls))
    ]


def _plan_gather(calls: Sequence[Call]) -> list[Task]:
    root = calls[0].root or 0
    return [partial(_place, _outputs([calls[root]])[0], _inputs(calls), own=root)]


def _plan_broadcast(calls: Sequence[Call]) -> list[Task]:
    root = calls[0].root or 0
    outputs = _outputs(calls)
    source = outputs.pop(root)
    return [partial(_copy, output, source) for output in outputs]


def _plan_scatter(calls: Sequence[Call]) -> list[Task]:
    root = calls[0].root or 0
    rows = _inputs([calls[root]])[0]
    tasks: list[Task] = []
    for rank, output in enumerate(_outputs(calls)):
        start = rank * output.numel()
        tasks.append(partial(_copy, output, rows[start : start + output.numel()]))
    return tasks


def _plan_all_to_all(calls: Sequence[Call]) -> list[Task]:
    tasks: list[Task] = []
    starts = [0] * len(calls)
    for receiver, call in enumerate(calls):
        assert call.output is not None
        position = 0
        for sender, rows in enumerate(call.output_splits or ()):
            source = calls[sender]
            assert source.input is not None
            offered = (source.input_splits or [])[receiver]
            if offered != rows:
                raise UsageError(
                    f"all_to_all: rank {sender} sends {offered} rows to rank {receiver}, which "
                    f"expects {rows}; input_splits[{receiver}] there and output_splits[{sender}] "
                    "here must be equal"
                )
            if rows:
                target = call.output[position : position + rows]
                begin = starts[sender]
                tasks.append(partial(_copy, target, source.input[begin : begin + rows]))
            position += rows
            starts[sender] += rows
    return tasks


def _plan_nothing(calls: Sequence[Call]) -> list[Task]:
    return []


_PLANS: dict[Kind, Callable[[Sequence[Call]], list[Task]]] = {
    Kind.ALL_REDUCE: _plan_all_reduce,
    Kind.REDUCE: _plan_reduce,
    Kind.REDUCE_SCATTER: _plan_reduce_scatter,
    Kind.ALL_GATHER: _plan_all_gather,
    Kind.GATHER: _plan_gather,
    Kind.BROADCAST: _plan_broadcast,
    Kind.SCATTER: _plan_scatter,
    Kind.ALL_TO_ALL: _plan_all_to_all,
    Kind.BARRIER: _plan_nothing,
}


def _inputs(calls: Sequence[Call]) -> list[torch.Tensor]:
    return [call.input.view(-1) for call in calls if call.input is not None]


def _outputs(calls: Sequence[Call]) -> list[torch.Tensor]:
    return [call.output.view(-1) for call in calls if call.output is not None]


def _combine_tasks(
    call: Call, parts: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> list[Task]:
    assert call.op is not None
    assert call.reduce_dtype is not None
    numel = parts[0].numel()
    if numel <= _CHUNK:
        return [partial(combine, outputs, parts, call.op, call.reduce_dtype)]
    tasks: list[Task] = []
    for start in range(0, numel, _CHUNK):
        cut = slice(start, start + _CHUNK)
        pieces = [part[cut] for part in parts]
        tasks.append(
            partial(combine, [out[cut] for out in outputs], pieces, call.op, call.reduce_dtype)
        )
    return tasks


def _place(output: torch.Tensor, parts: Sequence[torch.Tensor], own: int) -> None:
    start = 0
    for part in parts:
        _copy(output[start : start + part.numel()], part)
        start += part.numel()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
