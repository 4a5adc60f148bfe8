"""The store of a run's checkpoints: save, load, and what there is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, overload

from trainwright.checkpointing.errors import TreeError
from trainwright.checkpointing.protocol import Files
from trainwright.collectives import Communicator, SingleCommunicator

from .asynchronous import Pending
from .catalog import read_catalog
from .files import LocalFiles
from .index_reading import check_complete
from .loading import OpenFiles
from .manifest import is_run_name
from .opening import find_damage, find_newest
from .ranks import Ranks
from .reporting import LoadReport
from .restoring import LoadRequest, load_tree
from .retention import Retention
from .saver import Saver
from .saving import Place
from .tree import Tree


class StateStore:
    """Checkpoints of a whole training state in one folder, safe against crashes at any moment.

    The state is a tree of dictionaries, as state dicts are; lists that hold tensors are part of it.
    Its leaves are `Sharded` (the ranks hold parts), tensors and numpy arrays (every rank holds the
    same), and plain values: those of JSON, tuples, numbers of numpy, dtypes. Any layout loads
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

    def load(
        self, tree: Tree, step: int | None = None, *, convert: Collection[str] = ()
    ) -> dict[str, Any]:
        """Fill the tensors of ``tree`` in place and return it with the saved plain values.

        Every rank calls it with its own tree, cut in any way. Only the blocks of files that hold
        elements of this rank's parts are read, and each is verified. Everything is compared before
        the first tensor is written; an error while reading the data leaves tensors half-filled, and
        says which. Tied tensors come back under any of their names; where only the target ties
        them, the checkpoint must have equal values.

        Args:
            tree: What to fill; the plain values in it only say which are expected.
            step: Which one; None: the newest complete one. A save under way is waited for.
            convert: Paths whose stored dtype may be another one, real for real or complex for
                complex. A path also stands for all below it, and may have ``*`` and ``?``.

        Returns:
            A new tree with the same tensors.

        Raises:
            NoCheckpointError: There is no such complete checkpoint.
            MismatchError: Paths are missing, left over, or of another shape or dtype; they are
                listed with what was expected and found, the same on every rank.
            DamagedCheckpointError: A file is not what was written.
            LoadFailedError: A rank could not read.
            TreeError: The tree is not one that could have been saved, or the ranks ask for
                different things.

        Communicates: about fifteen collectives of a few bytes; all-to-alls of path and part of what
        this rank holds and of where that lies, and of 40 bytes a name.
        """
        return self._load(tree, lambda: LoadRequest.of(step, False, (), convert)).tree

    def load_partial(
        self,
        tree: Tree,
        step: int | None = None,
        *,
        skip: Collection[str] = (),
        convert: Collection[str] = (),
    ) -> LoadReport:
        """Fill what the checkpoint has of ``tree``, leave the rest as it is, and report on both.

        As `load`, but paths may be missing or left over: tensors that the checkpoint does not have
        stay as they are, plain values keep those of ``tree``, also single keys of dictionaries in
        lists, as of an optimizer's groups. Another shape, dtype or kind is an error still.

        Args:
            tree: What to fill, with the plain values for what is missing.
            step: Which one; None: the newest complete one.
            skip: Paths of ``tree`` that are left as they are, whatever the checkpoint has; written
                as those of ``convert``.
            convert: As for `load`.

        Returns:
            The tree, what was missing, unexpected, skipped and converted. ``str`` of it is for
            people.

        Raises:
            MismatchError: What the checkpoint has does not fit, or it has nothing of ``tree``. For
                the other errors see `load`.

        Communicates: as `load`, and the names that are reported.
        """
        return self._load(tree, lambda: LoadRequest.of(step, True, skip, convert))

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

    def _load(self, tree: Tree, ask: Callable[[], LoadRequest]) -> LoadReport:
        self._saver.settle()
        report = load_tree(self._ranks, self._place, self._saver.run, tree, ask)
        self._saver.run = report.run
        return report
