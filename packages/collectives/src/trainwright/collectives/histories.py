"""What ranks have called so far, compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from trainwright.collectives.errors import UsageError
from trainwright.collectives.flight import Record
from trainwright.collectives.headers import tell_groups
from trainwright.collectives.objects import all_gather_object
from trainwright.collectives.protocol import Communicator


@attrs.frozen
class History:
    """The collectives of one rank on one communicator.

    Args:
        count: How many it has called.
        digest: The sum of the hashes of their signatures, modulo 2**64.
        records: The last of them.
    """

    count: int
    digest: int
    records: Sequence[Record]


def compare_histories(comm: Communicator, history: History, timeout_s: float | None) -> None:
    """Raise on every rank unless all ranks have called the same.

    Raises:
        UsageError: They have not; names the first call that differs, as far as it is recorded.

    Communicates:
        An all-gather of 16 bytes a rank; where ranks differ, their records.
    """
    signed = history.digest - 2**64 if history.digest >= 2**63 else history.digest
    mine = torch.tensor([[history.count, signed]], device=comm.device)
    table = mine.new_empty((comm.size, 2))
    comm.all_gather(table, mine, timeout_s=timeout_s).wait()
    if bool((table == mine).all()):
        return
    records = all_gather_object(comm, list(history.records), timeout_s=timeout_s)
    counts = table[:, 0].tolist()
    difference = first_difference(dict(enumerate(records)), counts)
    raise UsageError(
        f"{comm.name!r}: ranks called different operations: {difference}. All ranks must call the "
        "same operations in the same order with the same shapes, dtypes and arguments"
    )


def first_difference(
    records: Mapping[int, Sequence[Record]], counts: Sequence[int] | None = None
) -> str | None:
    """Return what each rank called where ranks first differ, or None where they agree.

    Args:
        records: The recorded operations of one communicator by rank, as from `from_json`.
        counts: How many collectives each rank has called, where known; a rank whose records end
            earlier is told to have stopped there.
    """
    by_number = {
        rank: {record.number: record for record in kept if record.peer is None}
        for rank, kept in records.items()
    }
    starts = [min(found) for found in by_number.values() if found]
    ends = [max(found) for found in by_number.values() if found]
    for number in range(max(starts, default=0), max(ends, default=-1) + 1):
        called = {rank: found.get(number) for rank, found in by_number.items()}
        signatures = {None if call is None else call.signature for call in called.values()}
        if len(signatures) > 1:
            return tell_groups(
                {
                    rank: f"called nothing as #{number}" if call is None else str(call)
                    for rank, call in called.items()
                }
            )
    if counts is None:
        return None
    told = tell_groups({rank: f"called {count} collectives" for rank, count in enumerate(counts)})
    return f"earlier than what is still recorded ({told}); a FlightRecorder of more may tell"


def tell_flight(records: Mapping[int, Sequence[Record]]) -> str:
    """Return what the records of all ranks say about a run that hung or failed, as text.

    For each communicator: what ranks called where they first differ, and of each rank the last
    collective that it has finished and the first one that it has not.

    Args:
        records: By rank of the world, as each rank's `FlightRecorder.to_json` has kept them.
    """
    groups = dict.fromkeys(record.group for kept in records.values() for record in kept)
    lines: list[str] = []
    for group in groups:
        parts = {
            rank: [record for record in kept if record.group == group and record.peer is None]
            for rank, kept in records.items()
        }
        members = {rank: kept for rank, kept in parts.items() if kept}
        difference = first_difference(members)
        told = "the same on all ranks" if difference is None else f"differs: {difference}"
        lines.append(f"{group!r}: {told}")
        for rank, kept in members.items():
            finished = [record for record in kept if record.finished_s is not None]
            waiting = [record for record in kept if record.finished_s is None]
            last = f"last finished {finished[-1]}" if finished else "nothing finished"
            first = f"not finished {waiting[0]}" if waiting else "nothing open"
            lines.append(f"  rank {rank}: {last}; {first}")
    return "\n".join(lines)
