"""The saves of a store, one after the other, some of them in the background."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TypeVar

from trainwright.checkpointing.errors import (
    CheckpointingError,
    CheckpointingWarning,
    SaveFailedError,
    TreeError,
)

from .asynchronous import Background, Pending
from .catalog import read_catalog
from .planning import Place, check_step, not_saved, plan_save
from .ranks import Ranks, attempt
from .retention import Retention, rotate, take_protected
from .saving import write_save
from .tree import Leaves, Tree, check_axes, take_leaves

T = TypeVar("T")


class Saver:
    """Saves trees, and removes old checkpoints after each save.

    Args:
        ranks: The ranks.
        place: Where to write.
        retention: Which checkpoints stay; None: all.
        run: Which run saves; None: the first save makes up a name.
    """

    def __init__(
        self, ranks: Ranks, place: Place, retention: Retention | None, run: str | None
    ) -> None:
        self.run = run
        self._ranks = ranks
        self._place = place
        self._retention = retention
        self._background = Background(ranks)
        self._has_warned = False

    def save(self, step: int, tree: Tree, protect: Collection[int]) -> Path:
        """Save and return the checkpoint's folder; see `StateStore.save`."""
        self.settle()
        kept = self._agree_request(step, protect, "at once")
        folder, notes = self._write(step, tree, kept, self._ranks)
        for note in notes:
            warnings.warn(note, CheckpointingWarning, stacklevel=3)
        return folder

    def start(self, step: int, tree: Tree, protect: Collection[int]) -> Pending:
        """Take a copy of the state and save that in the background; see `StateStore.save`."""
        self.settle()
        kept = self._agree_request(step, protect, "in the background")
        state = self._agreed(step, lambda: self._copy(tree))
        return self._background.start(step, partial(self._write, step, state, kept))

    def settle(self) -> None:
        """Wait for what is under way and raise its error, unless it was raised before."""
        self._background.settle()

    def close(self, error: BaseException | None = None) -> None:
        """Settle, and give the memory of copies back.

        Args:
            error: What is being raised; it is not replaced by a failed save, but told of it.
        """
        try:
            self._background.close()
        except CheckpointingError as failure:
            if error is None:
                raise
            error.add_note(f"besides: {failure}")

    def _agreed(self, step: int, work: Callable[[], T]) -> T:
        return self._ranks.agreed(work, not_saved(step), SaveFailedError)

    def _agree_request(self, step: int, protect: Collection[int], how: str) -> frozenset[int]:
        """Return the protected steps; raise on all ranks where one was asked for another save.

        Only rank 0 removes checkpoints, so that what another one protects alone would be lost; and
        ranks that save in two ways would wait for each other.
        """

        def check() -> frozenset[int]:
            check_step(step)
            return take_protected(protect)

        kept = self._agreed(step, check)
        mine = f"step {step}, {how}, protect {sorted(kept)}"
        first = self._ranks.broadcast(mine.encode("ascii")).decode("ascii")

        def compare() -> None:
            if first != mine:
                raise TreeError(f"ranks must save the same: {mine} here, {first} on rank 0")

        self._agreed(step, compare)
        return kept

    def _copy(self, tree: Tree) -> Leaves:
        rank, size = self._ranks.comm.rank, self._ranks.comm.size
        coordinates = self._place.coordinates
        leaves = take_leaves(tree)
        check_axes(leaves, coordinates, size)
        return self._background.buffers.take(
            leaves, lambda leaf: leaf.everywhere or leaf.is_written_by(rank, coordinates)
        )

    def _write(
        self, step: int, tree: Tree | Leaves, protect: Collection[int], ranks: Ranks
    ) -> tuple[Path, list[str]]:
        plan = plan_save(ranks, self._place, step, tree)
        ticket = write_save(ranks, self._place, plan, self.run)
        self.run = ticket.run
        notes = self._tidy(ticket.run, ticket.name, protect) if ranks.comm.rank == 0 else []
        return self._place.root / ticket.name, notes

    def _tidy(self, run: str, name: str, protect: Collection[int]) -> list[str]:
        """Remove old checkpoints; return what looks odd, which is no error: the new one is safe."""
        place, retention = self._place, self._retention
        notes = []
        if retention is not None:
            _, error = attempt(lambda: rotate(place, run, retention, protect, name))
            if error is not None:
                notes.append(f"old checkpoints stay: {error}")
        if not self._has_warned:
            self._has_warned = True
            complete = read_catalog(place.files, place.root).complete
            others = sum(saved.manifest.run != run for saved in complete)
            if others:
                which = f"{others} checkpoints of other runs, which are kept"
                notes.append(f"{place.root} also holds {which}")
        return notes
