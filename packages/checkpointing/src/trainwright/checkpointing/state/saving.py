"""One save: a plan made of the tree by all ranks, then what needs only bytes, up to the rename."""

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

    @property
    def name(self) -> str:
        """The name of the folder once it is complete."""
        return committed_name(self.step, self.token)


@attrs.frozen(eq=False)
class SavePlan:
    """What a save will write, agreed by all ranks before a file is touched.

    Args:
        step: The step.
        owned: What this rank writes. The tensors are the user's; with copies in their place
            (``attrs.evolve``) the plan can be written while the user goes on.
        plain: Encoded plain values, the same on every rank.
        num_bytes: Bytes of all ranks' tensors.
    """

    step: int
    owned: tuple[TensorLeaf, ...]
    plain: Mapping[str, object]
    num_bytes: int


def plan_save(ranks: Ranks, place: Place, step: int, tree: Tree) -> SavePlan:
    """Look at the user's tensors and agree with the other ranks that they can be saved.

    No file is touched, so nothing is left behind where it fails.

    Raises:
        TreeError: The tree cannot be stored, or the ranks' trees do not fit together.

    Communicates: collectives of a few bytes, and the accounts of names.
    """
    return _Planning(ranks, place, step).plan(tree)


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


@attrs.frozen
class _Agreement:
    """Lets all ranks raise where one of them does."""

    ranks: Ranks
    step: int

    def __call__(self, work: Callable[[], T]) -> T:
        result, error = attempt(work)
        doing = f"step {self.step} was not saved, and checkpoints saved before are as they were"
        self.ranks.agree(error, doing, SaveFailedError)
        return result  # type: ignore[return-value]  # without an error there is a result


class _Planning:
    def __init__(self, ranks: Ranks, place: Place, step: int) -> None:
        self._ranks = ranks
        self._coordinates = place.coordinates
        self._step = step
        self._agreed = _Agreement(ranks, step)

    def plan(self, tree: Tree) -> SavePlan:
        leaves, owned, replicas = self._agreed(lambda: self._draft(tree))
        self._compare(leaves, owned, replicas)
        num_bytes = self._ranks.total(sum(leaf.num_bytes for leaf in owned))
        return SavePlan(self._step, owned, leaves.plain, num_bytes)

    def _draft(self, tree: Tree) -> tuple[Leaves, tuple[TensorLeaf, ...], dict[str, int]]:
        """Return what this rank holds, what it writes, and a checksum of each common leaf."""
        if type(self._step) is not int or not 0 <= self._step < 2**62:
            raise TreeError(f"step must be an integer from 0, got {self._step!r}")
        leaves = take_leaves(tree)
        rank, size = self._ranks.comm.rank, self._ranks.comm.size
        check_axes(leaves, self._coordinates, size)
        owned = tuple(
            leaf
            for leaf in leaves.tensors.values()
            if leaf.is_written_by(rank, self._coordinates)
            and (leaf.spec.numel > 0 or leaf.is_empty)
        )
        replicas = {
            path: zlib.crc32(dump_plain({path: value})) for path, value in leaves.plain.items()
        }
        for path, leaf in leaves.tensors.items():
            if leaf.everywhere:
                kind = f"{dtype_name(leaf.tensor.dtype)} {leaf.spec.global_shape}"
                replicas[path] = zlib.crc32(to_bytes(leaf.tensor), zlib.crc32(kind.encode()))
        return leaves, owned, replicas

    def _compare(
        self, leaves: Leaves, owned: tuple[TensorLeaf, ...], replicas: Mapping[str, int]
    ) -> None:
        """Raise unless all ranks save the same step, equal replicas, and each element once."""
        mine = {"step": self._step, "replicas": zlib.crc32(_dump(replicas))}
        first = json.loads(self._ranks.broadcast(_dump(mine)))
        theirs = replicas
        if self._ranks.total(int(first["replicas"] != mine["replicas"])):
            theirs = json.loads(self._ranks.broadcast(_dump(replicas)))
        written = {leaf.path for leaf in owned}
        problems = check_written_once(self._ranks, leaves.tensors.values(), written)
        if first["step"] != self._step:
            problems.append(f"step {self._step} here, step {first['step']} on rank 0")
        problems += [
            f"{path}: not the same as on rank 0; what differs between ranks must be Sharded"
            for path in sorted({*theirs, *replicas})
            if theirs.get(path) != replicas.get(path)
        ]
        self._agreed(lambda: raise_problems(problems, "the ranks' states do not fit", TreeError))


class _Writing:
    def __init__(self, ranks: Ranks, place: Place, plan: SavePlan) -> None:
        self._ranks = ranks
        self._place = place
        self._plan = plan
        self._agreed = _Agreement(ranks, plan.step)

    def write(self, run: str | None) -> Ticket:
        ticket = self._take_ticket(run)
        try:
            record = self._agreed(lambda: self._write_own_file(ticket))
            rows = self._ranks.gather([0, 0, 0] if record is None else attrs.astuple(record))
            self._agreed(lambda: self._commit(ticket, rows))
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
            catalog = read_catalog(files, root)
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
            return _dump(attrs.asdict(ticket))

        told = self._ranks.broadcast(self._agreed(issue))
        return Ticket(**json.loads(told))

    def _remove_leftovers(self, catalog: Catalog, run: str | None) -> None:
        """Remove what earlier saves of this run left behind when they were killed."""
        for folder, of_run in catalog.passing:
            if of_run == run:
                self._place.files.remove_folder(folder)

    def _check_space(self) -> None:
        free = self._place.files.free_bytes(self._place.root)
        needed = self._plan.num_bytes
        if free is not None and needed + _SPARE_BYTES > free:
            raise SaveFailedError(
                f"{self._place.root} has {free} bytes left, the checkpoint needs {needed}"
            )

    def _write_own_file(self, ticket: Ticket) -> FileRecord | None:
        if not self._plan.owned:
            return None
        path = self._temporary(ticket) / file_name(self._ranks.comm.rank)
        place = self._place
        return write_tensor_file(place.files, path, self._plan.owned, place.block_bytes)

    def _commit(self, ticket: Ticket, rows: list[list[int]]) -> None:
        """On rank 0: describe the files, make everything durable, and only then rename."""
        if self._ranks.comm.rank != 0:
            return
        files, temporary = self._place.files, self._temporary(ticket)
        records = tuple(FileRecord(*row) if row[0] else None for row in rows)
        plain = dict(self._plan.plain)
        manifest = Manifest(ticket.run, ticket.step, ticket.sequence, records, plain)
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
