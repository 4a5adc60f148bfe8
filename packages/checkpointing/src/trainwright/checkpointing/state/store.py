"""The store of a run's checkpoints: save, load, and what there is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from trainwright.checkpointing.errors import (
    LoadFailedError,
    MismatchError,
    NotAvailableYetError,
    TreeError,
)
from trainwright.checkpointing.protocol import Files
from trainwright.collectives import Communicator, SingleCommunicator

from .asynchronous import Pending
from .catalog import Saved, read_catalog
from .files import LocalFiles
from .index_reading import check_complete
from .ledger import find_unwanted, raise_problems
from .loading import OpenFiles, Want, compare_plain, fill_all, find_tensors
from .manifest import is_run_name
from .opening import find_damage, find_newest, open_newest
from .ranks import Ranks, attempt
from .retention import Retention
from .saver import Saver
from .saving import Place
from .tree import Leaves, Tree, check_axes, put_plain, take_leaves

T = TypeVar("T")


class StateStore:
    """Checkpoints of a whole training state in one folder, safe against crashes at any moment.

    The state is a nested dictionary with string keys. Its leaves are `Sharded` (the ranks hold
    parts), tensors (every rank holds the same), and plain values of JSON types. Any layout loads
    what any other saved: ranks, mesh, cuts and ZeRO ranges may all differ.

    A checkpoint is a folder with a file for each rank that wrote something, in the safetensors
    format, and ``manifest.json``. It is written under another name, synced, and renamed once every
    rank has said that its part is safe; so `latest` names complete ones only.

    A store that saves asynchronously is closed at the end, by `close` or as a context manager.

    Args:
        root: The folder; created by the first save. All ranks must see the same one.
        comm: The ranks that save and load together; None: this process alone.
        coordinates: This rank's coordinate on each mesh axis that specs name as replicated. A part
            is written by the rank with 0 on all of its axes.
        files: The file system.
        keep: Checkpoints of this run that stay after a save: so many of the last, what a
            `Retention` says, or with None all of them.
        run: Which run the checkpoints belong to. None: that of the first checkpoint loaded, or a
            new one made up by the first save. Those of other runs are never removed; with a run
            of its own, a store does not see them either.
        block_bytes: Bytes under one checksum, a multiple of 16: the least that a load reads.
        timeout_s: How long ranks wait for the slowest writer; None: the communicator's timeout.

    Raises:
        TreeError: An argument does not make sense.
    """

    def __init__(
        self,
        root: str | Path,
        comm: Communicator | None = None,
        *,
        coordinates: Mapping[str, int] | None = None,
        files: Files | None = None,
        keep: Retention | int | None = None,
        run: str | None = None,
        block_bytes: int = 1 << 20,
        timeout_s: float | None = None,
    ) -> None:
        if run is not None and not is_run_name(run):
            raise TreeError(f"run must be 1 to 64 letters, digits, '_', '.', '-', got {run!r}")
        if type(block_bytes) is not int or block_bytes < 16 or block_bytes % 16:
            raise TreeError(f"block_bytes must be a positive multiple of 16, got {block_bytes!r}")
        self._ranks = Ranks(comm if comm is not None else SingleCommunicator(), timeout_s)
        self._place = Place(
            files if files is not None else LocalFiles(),
            Path(root).absolute(),  # the working directory may change
            dict(coordinates or {}),
            block_bytes,
        )
        self._saver = Saver(self._ranks, self._place, Retention.of(keep), run)

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._saver.close(error)

    @property
    def root(self) -> Path:
        """The folder of all checkpoints."""
        return self._place.root

    @property
    def run(self) -> str | None:
        """The run of this store; None before its first save or load, unless it was given."""
        return self._saver.run

    @overload
    def save(self, step: int, tree: Tree, *, protect: Collection[int] = ...) -> Path: ...
    @overload
    def save(
        self, step: int, tree: Tree, *, protect: Collection[int] = ..., asynchronous: Literal[True]
    ) -> Pending: ...
    @overload
    def save(
        self, step: int, tree: Tree, *, protect: Collection[int] = ..., asynchronous: bool
    ) -> Path | Pending: ...
    def save(
        self, step: int, tree: Tree, *, protect: Collection[int] = (), asynchronous: bool = False
    ) -> Path | Pending:
        """Save ``tree`` as the checkpoint of ``step`` and the newest of this run.

        Every rank calls it with its own tree. A step may be saved again; the newer one is then the
        one that counts. An asynchronous save returns once it has a copy of the state, in host
        memory that the next one uses again, and writes that in a thread, over a communicator of
        its own. At most one is under way: the next save waits for it, and so do `load`, `close`
        and the end of the interpreter. Its error is raised by `Pending.wait`, or by the next call
        of these, which does nothing else then.

        Args:
            step: The step, not negative.
            tree: The state.
            protect: Steps (the best so far) whose newest checkpoint `keep` must not remove.
            asynchronous: Whether to return before the checkpoint is written.

        Returns:
            The checkpoint's folder, which would survive a power failure; with ``asynchronous`` what
            waits for it.

        Raises:
            TreeError: The tree cannot be stored, or the ranks' trees do not fit together.
            SaveFailedError: A rank could not write. Every rank raises it, naming the rank and the
                cause; what was saved before is untouched and nothing stays behind.

        Communicates: about fifteen collectives of a few bytes, and all-to-alls of 48 bytes for
        each name that the rank holds. No name or spec is sent. `Communicator.split` at the first
        asynchronous save.
        """
        if asynchronous:
            return self._saver.start(step, tree, protect)
        return self._saver.save(step, tree, protect)

    def close(self) -> None:
        """Wait for the asynchronous save under way, and give its memory back; every rank calls it.

        The store can be used again.

        Raises:
            SaveFailedError: A rank could not write, as `save` says.
        """
        self._saver.close()

    def load(self, tree: Tree, step: int | None = None, *, partial: bool = False) -> dict[str, Any]:
        """Fill the tensors of ``tree`` in place and return it with the saved plain values.

        Every rank calls it with its own tree, cut in any way. Only the blocks of files that hold
        elements of this rank's parts are read, and each is verified. Everything is compared before
        the first tensor is written; an error while reading the data leaves tensors half-filled.

        Args:
            tree: What to fill; the plain values in it only say which are expected.
            step: Which one; None: the newest complete one.
            partial: Not available yet.

        Returns:
            A new tree with the same tensors.

        Raises:
            NoCheckpointError: There is no such complete checkpoint.
            MismatchError: Paths are missing, left over, or of another shape or dtype; all are
                listed with what was expected and found.
            DamagedCheckpointError: A file is not what was written.
            LoadFailedError: A rank could not read.
            TreeError: The tree is not one that could have been saved.

        Communicates: about ten collectives of a few bytes, all-to-alls of 40 bytes a name.
        """
        self._saver.settle()
        leaves = self._agreed(lambda: self._take_target(tree, partial))
        place = self._place
        saved = open_newest(self._ranks, place.files, place.root, self._saver.run, step).saved
        plain = self._agreed(lambda: saved.manifest.decode_plain(saved.folder))
        files = OpenFiles(self._place.files, saved.folder, saved.manifest)
        with files:
            wants = self._match(files, saved, leaves)
            self._agreed(lambda: fill_all(files, wants))
        self._saver.run = saved.manifest.run
        return put_plain(tree, plain)

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None; asks no other rank."""
        saved = find_newest(self._place.files, self._place.root, self._saver.run)
        return None if saved is None else saved.manifest.step

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in the order of saving; asks no other rank.

        What was complete when it was saved counts; only `latest`, `load`, `verify` and `leftovers`
        look whether its files are still there.

        A step that was saved again has the place of the newer one.
        """
        saved = read_catalog(self._place.files, self._place.root).of_run(self._saver.run)
        steps = [entry.manifest.step for entry in saved]
        return [step for number, step in enumerate(steps) if step not in steps[number + 1 :]]

    def runs(self) -> list[str]:
        """Return the runs of all complete checkpoints in the folder; asks no other rank."""
        catalog = read_catalog(self._place.files, self._place.root)
        return list(dict.fromkeys(saved.manifest.run for saved in catalog.complete))

    def leftovers(self) -> list[str]:
        """Return what lies in the folder and is no complete checkpoint; asks no other rank.

        A later save removes what an interrupted save or removal of its own run left behind.
        """
        catalog = read_catalog(self._place.files, self._place.root)
        broken = [f"{folder}: {reason}" for folder, reason in catalog.broken]
        for saved in catalog.complete:
            damage = find_damage(self._place.files, saved)
            if damage is not None:
                broken.append(f"{saved.folder}: {damage}")
        return broken + [f"{folder}: interrupted, or under way" for folder, _ in catalog.passing]

    def verify(self, step: int | None = None) -> None:
        """Read a whole checkpoint and compare every checksum; asks no other rank.

        Raises:
            NoCheckpointError: There is no such complete checkpoint.
            DamagedCheckpointError: A file is not what was written.
        """
        place = self._place
        saved = read_catalog(place.files, place.root).choose(self._saver.run, step, place.root)
        check_complete(place.files, saved)
        with OpenFiles(place.files, saved.folder, saved.manifest) as files:
            for _, file in files.nearest_first(0):
                file.verify()

    def _agreed(self, work: Callable[[], T]) -> T:
        result, error = attempt(work)
        self._ranks.agree(error, f"{self._place.root} was not loaded", LoadFailedError)
        return result  # type: ignore[return-value]  # without an error there is a result

    def _take_target(self, tree: Tree, partial: bool) -> Leaves:
        if partial:
            raise NotAvailableYetError("partial loads are not available yet")
        leaves = take_leaves(tree)
        check_axes(leaves, self._place.coordinates, self._ranks.comm.size)
        return leaves

    def _match(self, files: OpenFiles, saved: Saved, leaves: Leaves) -> list[Want]:
        """Find every wanted tensor; agree with the other ranks that nothing is missing or extra."""
        rank, size = self._ranks.comm.rank, self._ranks.comm.size

        def look() -> tuple[list[Want], list[str], set[str]]:
            wants, problems = find_tensors(files, leaves, rank)
            names: set[str] = set()
            for number in range(rank, len(files), size):
                file = files.get(number)
                names.update(file.tensors if file is not None else ())
            return wants, problems + compare_plain(leaves.plain, saved.manifest), names

        wants, problems, names = self._agreed(look)
        problems = problems + [
            f"{name}: expected nothing of that path, found a tensor in the checkpoint"
            for name in find_unwanted(self._ranks, leaves.tensors, names)
        ]
        doing = f"{saved.folder.name} is not what the target expects"
        self._agreed(lambda: raise_problems(problems, doing, MismatchError))
        return wants
