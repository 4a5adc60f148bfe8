"""How much a rank has communicated, as a value that adds, subtracts, compares and prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from trainwright.collectives.protocol import Recv, Send

_COLUMNS = ("operations", "messages", "in", "out", "sent", "bytes in", "bytes out", "bytes sent")


@attrs.frozen
class Flow:
    """What operations of one kind moved, counted on one rank.

    Args:
        operations: Calls.
        messages: Messages sent by ``send`` and ``exchange``; collectives count none.
        elements_in: Elements that the calls read from this rank's tensors.
        elements_out: Elements that they wrote to this rank's tensors.
        elements_sent: Elements that must leave this rank: those of its messages, and of a
            collective as many as the direct exchange in at most two rounds sends (see
            `elements_sent`). That is the least possible, summed over the ranks.
        bytes_in: Bytes of ``elements_in``.
        bytes_out: Bytes of ``elements_out``.
        bytes_sent: Bytes of ``elements_sent``.
    """

    operations: int = 0
    messages: int = 0
    elements_in: int = 0
    elements_out: int = 0
    elements_sent: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_sent: int = 0

    def __add__(self, other: Flow) -> Flow:
        """Return both together."""
        pairs = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return Flow(*(one + two for one, two in pairs))

    def __sub__(self, other: Flow) -> Flow:
        """Return what this counts beyond the other."""
        pairs = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return Flow(*(one - two for one, two in pairs))


NOTHING = Flow()


def _without_nothing(flows: Mapping[str, Flow]) -> dict[str, Flow]:
    return {kind: flows[kind] for kind in sorted(flows) if flows[kind] != NOTHING}


@attrs.frozen
class Traffic:
    """The flows of a rank by the name of the operation, such as ``all_gather`` or ``exchange``.

    ``after - before`` is what happened in between. Kinds that did not occur are equal to
    `NOTHING`, so that two traffics are equal when they count the same.
    """

    _flows: dict[str, Flow] = attrs.field(factory=dict, converter=_without_nothing)

    def __getitem__(self, kind: str) -> Flow:
        """Return the flow of one kind of operation."""
        return self._flows.get(kind, NOTHING)

    def __iter__(self) -> Iterator[str]:
        """Go through the kinds that occurred, sorted."""
        return iter(self._flows)

    @property
    def total(self) -> Flow:
        """All kinds together."""
        return sum(self._flows.values(), NOTHING)

    def __add__(self, other: Traffic) -> Traffic:
        """Return both together."""
        return Traffic({kind: self[kind] + other[kind] for kind in {*self, *other}})

    def __sub__(self, other: Traffic) -> Traffic:
        """Return what this counts beyond the other."""
        return Traffic({kind: self[kind] - other[kind] for kind in {*self, *other}})

    def __str__(self) -> str:
        """Return a table with one line a kind and one for all."""
        named = [*self._flows.items(), ("total", self.total)]
        rows = [["", *_COLUMNS]]
        rows += [[kind, *(f"{n:,}" for n in attrs.astuple(flow))] for kind, flow in named]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


class TrafficCounter:
    """Counts flows up, one addition after the other."""

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {}

    @property
    def traffic(self) -> Traffic:
        """What has been counted so far."""
        return Traffic({kind: Flow(*row) for kind, row in self._rows.items()})

    def add(self, kind: str, read: int, written: int, sent: int, itemsize: int) -> None:
        """Count one operation that read, wrote and sent so many elements of ``itemsize`` bytes."""
        row = self._row(kind)
        row[0] += 1
        _add_elements(row, read, written, sent, itemsize)

    def add_messages(self, kind: str, messages: Sequence[Send | Recv]) -> None:
        """Count one operation that consists of these messages."""
        row = self._row(kind)
        row[0] += 1
        for message in messages:
            numel = message.tensor.numel()
            itemsize = message.tensor.itemsize
            if isinstance(message, Send):
                row[1] += 1
                _add_elements(row, numel, 0, numel, itemsize)
            else:
                _add_elements(row, 0, numel, 0, itemsize)

    def _row(self, kind: str) -> list[int]:
        row = self._rows.get(kind)
        if row is None:
            row = self._rows[kind] = [0] * len(_COLUMNS)
        return row


def _add_elements(row: list[int], read: int, written: int, sent: int, itemsize: int) -> None:
    row[2] += read
    row[3] += written
    row[4] += sent
    row[5] += read * itemsize
    row[6] += written * itemsize
    row[7] += sent * itemsize


def elements_sent(kind: str, numel: int, rank: int, size: int, root: int | None = None) -> int:
    """Return how many elements a rank sends in a collective on ``numel`` elements.

    Counted as messages between every two ranks in at most two rounds, the large tensor being cut
    into ``size`` parts as even as possible. All ranks together send (n-1) ``numel`` for
    reduce-scatter, all-gather, all-to-all, and twice that for all-reduce.

    Args:
        kind: The operation's name.
        numel: Elements of its large tensor, or of its only one.
        rank: The rank that sends.
        size: The number of ranks.
        root: For operations that have one.
    """
    chunk = numel // size + (rank < numel % size)
    if size == 1 or kind in ("barrier", "split"):
        return 0
    if kind in ("reduce_scatter", "all_to_all"):
        return numel - chunk
    if kind == "all_reduce":
        return numel - chunk + (size - 1) * chunk
    if kind == "reduce":
        return numel - chunk + (0 if rank == root else chunk)
    if kind == "all_gather":
        return (size - 1) * chunk
    if kind == "gather":
        return 0 if rank == root else chunk
    if kind == "scatter":
        return numel - chunk if rank == root else 0
    if kind == "broadcast":
        # The root's own chunk goes to everybody: nobody else can forward it.
        return numel - chunk + (size - 1) * chunk if rank == root else (size - 2) * chunk
    raise KeyError(kind)
