"""The writing of a planned save: every rank its file, the keepers the index, rank 0 the rename."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import attrs

from trainwright.checkpointing.errors import CheckpointingError, SaveFailedError

from .catalog import (
    Catalog,
    check_length,
    committed_name,
    read_catalog,
    remove_checkpoint,
    saving_name,
)
from .index_writing import tell_of_file, write_index
from .manifest import MANIFEST, IndexRecord, Manifest, file_name, index_name
from .planning import Place, SavePlan, not_saved, plan_save
from .ranks import Ranks, attempt
from .sealed import write_whole
from .tensor_file import FileRecord, write_tensor_file

__all__ = ["Place", "SavePlan", "Ticket", "plan_save", "write_save"]

T = TypeVar("T")
_SPARE_BYTES = 1 << 20  # headers, checksums and manifest, in the estimate of space
_DATA, _INDEX, _RECORD = range(3)  # what a row tells of


@attrs.frozen
class Ticket:
    """What rank 0 decides for all ranks about one save."""

    run: str
    step: int
    sequence: int
    token: str

    @property
    def name(self) -> str:
        """The name of the folder once it is complete."""
        return committed_name(self.step, self.token)


def write_save(ranks: Ranks, place: Place, plan: SavePlan, run: str | None) -> Ticket:
    """Write what was planned and return the names under which it was done.

    It needs the plan's bytes and ranks in the order of those that planned, not the user's tree nor
    the communicator of the planning.

    Args:
        ranks: The ranks.
        place: Where to write.
        plan: What to write.
        run: Which run saves; None: rank 0 makes up a name.

    Raises:
        SaveFailedError: A rank could not write; every rank raises it and nothing stays behind.

    Communicates: a dozen collectives of a few bytes.
    """
    return _Writing(ranks, place, plan).write(run)


class _Writing:
    def __init__(self, ranks: Ranks, place: Place, plan: SavePlan) -> None:
        self._ranks = ranks
        self._place = place
        self._plan = plan

    def write(self, run: str | None) -> Ticket:
        ticket = self._take_ticket(run)
        try:
            record = self._agreed(lambda: self._write_own_file(ticket))
            rows = tell_of_file(self._ranks, self._plan.index, record)
            part = self._agreed(lambda: self._write_index(ticket, rows))
            parts = self._compare_lengths(ticket, part)
            self._agreed(lambda: self._commit(ticket, parts))
        except CheckpointingError:
            # All ranks have agreed on the failure, so none of them is writing any more.
            if self._ranks.comm.rank == 0:
                self._discard(ticket)
            raise
        return ticket

    def _take_ticket(self, run: str | None) -> Ticket:
        def issue() -> bytes:
            if self._ranks.comm.rank != 0:
                return b""
            files, root = self._place.files, self._place.root
            catalog = read_catalog(files, root, self._place.known)
            self._remove_leftovers(catalog, run)
            ticket = Ticket(
                run if run is not None else secrets.token_hex(8),
                self._plan.step,
                catalog.last_sequence + 1,
                secrets.token_hex(4),
            )
            files.make_folder(root)
            self._check_space()
            files.make_folder(self._temporary(ticket))
            return json.dumps(attrs.asdict(ticket)).encode("ascii")

        told = self._ranks.broadcast(self._agreed(issue))
        return Ticket(**json.loads(told))

    def _remove_leftovers(self, catalog: Catalog, run: str | None) -> None:
        """Remove what earlier saves of this run left behind when they were killed."""
        for folder, of_run in catalog.passing:
            if of_run == run:
                remove_checkpoint(self._place.files, folder, of_run)

    def _check_space(self) -> None:
        free = self._place.files.free_bytes(self._place.root)
        needed = self._plan.num_bytes
        if free is not None and needed + _SPARE_BYTES > free:
            raise SaveFailedError(
                f"{self._place.root} has {free} bytes left, the checkpoint needs {needed}"
            )

    def _write_own_file(self, ticket: Ticket) -> FileRecord | None:
        planned = self._plan.index.file
        if planned is None:
            return None
        path = self._temporary(ticket) / file_name(planned.number)
        place = self._place
        record = write_tensor_file(place.files, path, self._plan.owned, place.block_bytes)
        assert record.size == planned.size, "what is written has the shapes that were planned"
        return record

    def _write_index(self, ticket: Ticket, rows: list[list[int]]) -> IndexRecord | None:
        return write_index(self._place.files, self._temporary(ticket), self._plan.index, rows)

    def _compare_lengths(self, ticket: Ticket, part: IndexRecord | None) -> list[list[int]]:
        """Let each rank look at the files of the rank before it; return the index files' records.

        Where ranks see different folders, or a machine has not yet what another wrote, some rank
        does not find the files of the one before. Only rank 0 gets the records.
        """
        index = self._plan.index
        rank, size = self._ranks.comm.rank, self._ranks.comm.size
        outgoing: list[list[list[int]]] = [[] for _ in range(size)]
        if index.file is not None:
            outgoing[(rank + 1) % size].append([_DATA, rank, index.file.size, 0])
        if part is not None and index.number is not None:
            outgoing[(rank + 1) % size].append([_INDEX, index.number, part.size, part.crc32])
            outgoing[0].append([_RECORD, index.number, part.size, part.crc32])
        rows = [row for told in self._ranks.exchange(outgoing, 4) for row in told]

        def look() -> None:
            for kind, number, length, _ in rows:
                if kind != _RECORD:
                    name = file_name(number) if kind == _DATA else index_name(number)
                    check_length(self._place.files, self._temporary(ticket) / name, length)

        self._agreed(look)
        return sorted(row[1:] for row in rows if row[0] == _RECORD)

    def _commit(self, ticket: Ticket, parts: list[list[int]]) -> None:
        """On rank 0: describe the checkpoint, make everything durable, and only then rename."""
        if self._ranks.comm.rank != 0:
            return
        files, temporary = self._place.files, self._temporary(ticket)
        manifest = Manifest(
            ticket.run,
            ticket.step,
            ticket.sequence,
            dict(self._plan.plain),
            self._ranks.comm.size,
            tuple(IndexRecord(size, crc32) for _, size, crc32 in parts),
        )
        write_whole(files, temporary / MANIFEST, manifest.encode())
        files.sync_folder(temporary)
        files.rename(temporary, self._place.root / ticket.name)
        files.sync_folder(self._place.root)

    def _discard(self, ticket: Ticket) -> None:
        files, temporary = self._place.files, self._temporary(ticket)
        attempt(lambda: files.rename(self._place.root / ticket.name, temporary))
        attempt(lambda: files.remove_folder(temporary))

    def _agreed(self, work: Callable[[], T]) -> T:
        return self._ranks.agreed(work, not_saved(self._plan.step), SaveFailedError)

    def _temporary(self, ticket: Ticket) -> Path:
        return self._place.root / saving_name(ticket.name, ticket.run)
