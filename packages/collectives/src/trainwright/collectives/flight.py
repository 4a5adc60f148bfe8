"""A ring of the last operations of a rank, for the moment when something went wrong."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections import deque
from types import FrameType
from typing import Any

import attrs
import torch

from trainwright.collectives.checks import check_at_least_one
from trainwright.collectives.errors import UsageError

# Of an error a line shows no more than this.
_MAX_ERROR = 120

_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_TESTING = os.path.join(_HERE, "testing", "")
_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")


@attrs.define
class Record:
    """One operation, as its rank called it.

    Args:
        group: Name of the communicator.
        number: Which collective of the communicator it is, from 0; messages are counted apart.
        kind: The operation's name; each message of an exchange is a ``send`` or ``recv``.
        shape: The part of its tensors that is alike on every rank; of an all-to-all, one row.
        dtype: The tensors' dtype, None where there are no tensors.
        op: How contributions are combined, or None.
        reduce_dtype: The dtype that they are combined in, or None for the usual one.
        root: The root, or None.
        peer: The other rank of a message, or None.
        tag: The tag of a message, or None.
        place: File and line outside of this package, such as ``layer.py:40``.
        started_s: When it was called, in seconds since 1970.
        finished_s: When its ``wait`` returned, or None; on CUDA the host is told early.
        error: What its ``wait`` raised, or None.
    """

    group: str
    number: int
    kind: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    op: str | None = None
    reduce_dtype: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    place: str = "?"
    started_s: float = 0.0
    finished_s: float | None = None
    error: str | None = None

    @property
    def signature(self) -> str:
        """What must be alike on every rank: all but the place, the times and the group."""
        parts = [f"{self.kind} #{self.number}"]
        if self.shape is not None:
            parts.append(f"{self.shape} {self.dtype}")
        if self.op is not None:
            parts.append(self.op)
        if self.reduce_dtype is not None:
            parts.append(f"reduce_dtype={self.reduce_dtype}")
        if self.root is not None:
            parts.append(f"root={self.root}")
        if self.peer is not None:
            parts.append(f"{'to' if self.kind == 'send' else 'from'} rank {self.peer}")
        if self.tag is not None:
            parts.append(f"tag={self.tag}")
        return " ".join(parts)

    def __str__(self) -> str:
        """Name the operation and where it was called."""
        return f"{self.signature} at {self.place}"

    def describe(self, now_s: float) -> str:
        """Say also what became of it."""
        if self.error is not None:
            state = f"failed: {self.error[:_MAX_ERROR]}"
        elif self.finished_s is not None:
            state = f"finished after {(self.finished_s - self.started_s) * 1e3:.1f} ms"
        else:
            state = f"started {now_s - self.started_s:.1f} s ago, not finished"
        return f"{self} in {self.group!r}: {state}"


class FlightRecorder:
    """The last ``capacity`` operations of one rank, of one communicator or several.

    Args:
        capacity: How many records are kept; one takes about half a kilobyte.

    Raises:
        UsageError: ``capacity`` is not a positive number.
    """

    def __init__(self, capacity: int = 256) -> None:
        check_at_least_one("FlightRecorder", "capacity", capacity)
        self._ring: deque[Record] = deque(maxlen=capacity)
        self._num_added = 0

    def __repr__(self) -> str:
        """Say how full it is."""
        return f"FlightRecorder({len(self._ring)} of {self._num_added} operations)"

    @property
    def num_forgotten(self) -> int:
        """How many older records the ring no longer holds."""
        return self._num_added - len(self._ring)

    def add(self, record: Record) -> None:
        """Keep a record, which the caller completes later."""
        self._ring.append(record)
        self._num_added += 1

    def records(self, group: str | None = None) -> list[Record]:
        """Return copies of what is kept, oldest first; with ``group`` of that communicator only."""
        return [
            attrs.evolve(record)
            for record in list(self._ring)
            if group is None or record.group == group
        ]

    def dump(self, last: int | None = None) -> str:
        """Return the last operations as text, one a line, oldest first; None: all that is kept."""
        now_s = time.time()
        records = list(self._ring)
        shown = records if last is None else records[max(0, len(records) - last) :]
        return "\n".join(record.describe(now_s) for record in shown)

    def to_json(self) -> str:
        """Return what is kept as JSON: a list of objects with the fields of `Record`."""
        return json.dumps([attrs.asdict(record) for record in list(self._ring)])


def from_json(text: str) -> list[Record]:
    """Return the records that `FlightRecorder.to_json` wrote.

    Raises:
        UsageError: It did not write this text.
    """
    try:
        rows = json.loads(text)
        return [_record(fields) for fields in rows]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise UsageError(f"these are no records of a flight recorder: {error!r:.300}") from error


def find_place() -> str:
    """Return file and line of the nearest caller outside of this package and torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_passed(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.cache
def _is_passed(file_name: str) -> bool:
    # The testing part of this package holds programs that use it.
    is_ours = file_name.startswith(_HERE) and not file_name.startswith(_TESTING)
    return is_ours or file_name.startswith(_TORCH) or file_name == contextlib.__file__


def _record(fields: dict[str, Any]) -> Record:
    shape = fields["shape"]
    record = Record(**{**fields, "shape": None if shape is None else tuple(shape)})
    kinds: tuple[tuple[object, tuple[type, ...]], ...] = (
        *((value, (str,)) for value in (record.group, record.kind, record.place)),
        *((value, (int,)) for value in (record.number, *(record.shape or ()))),
        *((value, (int, type(None))) for value in (record.root, record.peer, record.tag)),
        *((value, (str, type(None))) for value in (record.dtype, record.op, record.error)),
        (record.reduce_dtype, (str, type(None))),
        (record.started_s, (int, float)),
        (record.finished_s, (int, float, type(None))),
    )
    for value, allowed in kinds:
        if type(value) not in allowed:
            raise TypeError(f"{value!r:.80} where {allowed[0].__name__} is expected")
    return record
