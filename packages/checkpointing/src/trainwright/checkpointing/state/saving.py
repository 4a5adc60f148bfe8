"""One save, from the tree to the rename that makes it count."""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import attrs

from trainwright.checkpointing.errors import CheckpointingError, SaveFailedError, TreeError
from trainwright.checkpointing.protocol import Files

from .catalog import Catalog, check_lengths, committed_name, read_catalog, saving_name
from .dtypes import dtype_name, to_bytes
from .ledger import check_written_once, raise_problems
from .manifest import MANIFEST, Manifest, file_name
from .ranks import Ranks, attempt
from .tensor_file import FileRecord, write_tensor_file
from .tree import Leaves, TensorLeaf, Tree, check_axes, dump_plain, take_leaves

T = TypeVar("T")
_SPARE_BYTES = 1 << 20  # headers, checksums and manifest, in the estimate of space


@attrs.frozen
class Place:
    """Where and how a store writes.

    Args:
        files: The file system.
        root: The folder of all checkpoints.
        coordinates: This rank's coordinate on each mesh axis.
        block_bytes: Bytes under one checksum.
    """

    files: Files
    root: Path
    coordinates: Mapping[str, int]
    block_bytes: int


@attrs.frozen
class Ticket:
    """What rank 0 decides for all ranks about one save."""

    run: str
    step: int
    sequence: int
    token: str
    replicas_crc32: int

    @property
    def name(self) -> str:
        """The name of the folder once it is complete."""
        return committed_name(self.step, self.token)


@attrs.frozen(eq=False)
class Draft:
    """What this rank holds, what it writes, and a checksum of each leaf that all ranks share."""

    leaves: Leaves
    owned: list[TensorLeaf]
    replicas: dict[str, int]

    @property
    def replicas_crc32(self) -> int:
        """One checksum of all that must be the same on every rank."""
        return zlib.crc32(_dump(self.replicas))


class Save:
    """Writes one tree as the newest checkpoint; every rank makes one and calls `run`.

    Args:
        ranks: The ranks.
        place: Where to write.
        step: The step.
        tree: The state.
        run: Which run saves; None: rank 0 makes up a name.
    """

    def __init__(self, ranks: Ranks, place: Place, step: int, tree: Tree, run: str | None) -> None:
        self._ranks = ranks
        self._place = place
        self._step = step
        self._tree = tree
        self._run = run

    def run(self) -> Ticket:
        """Save and return the names under which it was done.

        Communicates: a dozen collectives of a few bytes, and the accounts of names.
        """
        draft = self._agreed(self._draft)
        num_bytes = self._ranks.total(sum(leaf.num_bytes for leaf in draft.owned))
        ticket = self._take_ticket(draft, num_bytes)
        try:
            self._compare(draft, ticket)
            record = self._agreed(lambda: self._write_own_file(draft, ticket))
            rows = self._ranks.gather([0, 0, 0] if record is None else attrs.astuple(record))
            self._agreed(lambda: self._commit(draft, ticket, rows))
        except CheckpointingError:
            # All ranks have agreed on the failure, so none of them is writing any more.
            if self._ranks.comm.rank == 0:
                self._discard(ticket)
            raise
        return ticket

    def _agreed(self, work: Callable[[], T]) -> T:
        result, error = attempt(work)
        doing = f"step {self._step} was not saved, and checkpoints saved before are as they were"
        self._ranks.agree(error, doing, SaveFailedError)
        return result  # type: ignore[return-value]  # without an error there is a result

    def _draft(self) -> Draft:
        if type(self._step) is not int or not 0 <= self._step < 2**62:
            raise TreeError(f"step must be an integer from 0, got {self._step!r}")
        leaves = take_leaves(self._tree)
        coordinates = self._place.coordinates
        rank, size = self._ranks.comm.rank, self._ranks.comm.size
        check_axes(leaves, coordinates, size)
        owned = [
            leaf
            for leaf in leaves.tensors.values()
            if leaf.is_written_by(rank, coordinates) and (leaf.spec.numel > 0 or leaf.is_empty)
        ]
        replicas = {
            path: zlib.crc32(dump_plain({path: value})) for path, value in leaves.plain.items()
        }
        for path, leaf in leaves.tensors.items():
            if leaf.everywhere:
                kind = f"{dtype_name(leaf.tensor.dtype)} {leaf.spec.global_shape}"
                replicas[path] = zlib.crc32(to_bytes(leaf.tensor), zlib.crc32(kind.encode()))
        return Draft(leaves, owned, replicas)

    def _take_ticket(self, draft: Draft, num_bytes: int) -> Ticket:
        def issue() -> bytes:
            if self._ranks.comm.rank != 0:
                return b""
            files, root = self._place.files, self._place.root
            catalog = read_catalog(files, root)
            self._remove_leftovers(catalog)
            run = self._run if self._run is not None else secrets.token_hex(8)
            ticket = Ticket(
                run,
                self._step,
                catalog.last_sequence + 1,
                secrets.token_hex(4),
                draft.replicas_crc32,
            )
            files.make_folder(root)
            self._check_space(num_bytes)
            files.make_folder(root / saving_name(ticket.name, run))
            return _dump(attrs.asdict(ticket))

        told = self._ranks.broadcast(self._agreed(issue))
        return Ticket(**json.loads(told))

    def _remove_leftovers(self, catalog: Catalog) -> None:
        """Remove what earlier saves of this run left behind when they were killed."""
        for folder, run in catalog.passing:
            if run == self._run:
                self._place.files.remove_folder(folder)

    def _check_space(self, num_bytes: int) -> None:
        free = self._place.files.free_bytes(self._place.root)
        if free is not None and num_bytes + _SPARE_BYTES > free:
            raise SaveFailedError(
                f"{self._place.root} has {free} bytes left, the checkpoint needs {num_bytes}"
            )

    def _compare(self, draft: Draft, ticket: Ticket) -> None:
        """Raise unless all ranks save the same step, equal replicas, and each element once."""
        differs = ticket.replicas_crc32 != draft.replicas_crc32
        theirs = draft.replicas
        if self._ranks.total(int(differs)):
            theirs = json.loads(self._ranks.broadcast(_dump(draft.replicas)))
        written = {leaf.path for leaf in draft.owned}
        problems = check_written_once(self._ranks, draft.leaves.tensors.values(), written)
        if ticket.step != self._step:
            problems.append(f"step {self._step} here, step {ticket.step} on rank 0")
        problems += [
            f"{path}: not the same as on rank 0; what differs between ranks must be Sharded"
            for path in sorted({*theirs, *draft.replicas})
            if theirs.get(path) != draft.replicas.get(path)
        ]
        self._agreed(lambda: raise_problems(problems, "the ranks' states do not fit", TreeError))

    def _write_own_file(self, draft: Draft, ticket: Ticket) -> FileRecord | None:
        if not draft.owned:
            return None
        path = self._temporary(ticket) / file_name(self._ranks.comm.rank)
        return write_tensor_file(self._place.files, path, draft.owned, self._place.block_bytes)

    def _commit(self, draft: Draft, ticket: Ticket, rows: list[list[int]]) -> None:
        """On rank 0: describe the files, make everything durable, and only then rename."""
        if self._ranks.comm.rank != 0:
            return
        files, temporary = self._place.files, self._temporary(ticket)
        records = tuple(FileRecord(*row) if row[0] else None for row in rows)
        manifest = Manifest(ticket.run, ticket.step, ticket.sequence, records, draft.leaves.plain)
        check_lengths(files, temporary, manifest)  # also: do all ranks see the same folder?
        writer = files.create(temporary / MANIFEST)
        try:
            writer.write(manifest.encode())
            writer.sync()
        finally:
            writer.close()
        files.sync_folder(temporary)
        files.rename(temporary, self._place.root / ticket.name)
        files.sync_folder(self._place.root)

    def _discard(self, ticket: Ticket) -> None:
        files, temporary = self._place.files, self._temporary(ticket)
        attempt(lambda: files.rename(self._place.root / ticket.name, temporary))
        attempt(lambda: files.remove_folder(temporary))

    def _temporary(self, ticket: Ticket) -> Path:
        return self._place.root / saving_name(ticket.name, ticket.run)


def _dump(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
