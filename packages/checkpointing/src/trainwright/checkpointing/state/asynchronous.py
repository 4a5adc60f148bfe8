"""Saves that go on in a thread while training continues."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import attrs

from trainwright.checkpointing.errors import CheckpointingError, CheckpointingWarning

from .ranks import Ranks
from .snapshot import SnapshotBuffers

# What a save returns: the checkpoint's folder, and what its owner should look at.
Saving = Callable[[Ranks], tuple[Path, list[str]]]


class Pending:
    """A save under way in a thread, which the end of the interpreter waits for.

    `StateStore.save` makes it. Its error is raised by `wait`, or by the store's next call; if
    neither comes, it is a `CheckpointingWarning` at the end.
    """

    def __init__(self, step: int, work: Callable[[], tuple[Path, list[str]]]) -> None:
        self._step = step
        self._work: Callable[[], tuple[Path, list[str]]] | None = work
        self._folder: Path | None = None
        self._notes: list[str] = []
        self._error: BaseException | None = None
        self._is_told = False
        self._untold: list[str] = []
        weakref.finalize(self, _report, self._untold)
        self._thread = threading.Thread(target=self._run, name=f"save of step {step}")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the save is over, well or not, so that `wait` would not wait."""
        return not self._thread.is_alive()

    @property
    def is_told(self) -> bool:
        """Whether somebody has waited for it, and so knows how it ended."""
        return self._is_told

    def wait(self) -> Path:
        """Return the checkpoint's folder once it would survive a power failure.

        Every rank calls it, or none.

        Raises:
            TreeError: The ranks' trees do not fit together.
            SaveFailedError: A rank could not write. Every rank raises it; what was saved before is
                untouched and nothing stays behind.
        """
        self._thread.join()
        self._is_told = True
        self._untold.clear()
        while self._notes:
            warnings.warn(self._notes.pop(0), CheckpointingWarning, stacklevel=2)
        if self._error is not None:
            raise self._error
        assert self._folder is not None
        return self._folder

    def _run(self) -> None:
        assert self._work is not None
        try:
            self._folder, self._notes = self._work()
        except BaseException as error:  # whatever it is, the waiting thread shall hear of it
            self._error = error
            self._untold.append(f"step {self._step} was not saved, and nobody asked: {error!r}")
        finally:
            self._work = None  # with the snapshot that it holds


class Background:
    """What a store needs to save in the background: at most one save, its memory, its ranks.

    Args:
        ranks: The store's ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own: Ranks | None = None
        self._pending: Pending | None = None
        self.buffers = SnapshotBuffers()

    def start(self, step: int, work: Saving) -> Pending:
        """Start a save; the one before has been settled.

        Communicates: `Communicator.split` at the first one.
        """
        if self._own is None:
            comm = self._ranks.comm.split(0, self._ranks.comm.rank)
            assert comm is not None
            self._own = attrs.evolve(self._ranks, comm=comm)
        own = self._own
        self._pending = Pending(step, lambda: self._guard(own, work))
        return self._pending

    def settle(self) -> None:
        """Wait for the save under way, if there is one, and raise what nobody has been told yet."""
        pending = self._pending
        if pending is not None and not pending.is_told:
            pending.wait()  # where this is interrupted, the next call waits again
        self._pending = None

    def close(self) -> None:
        """Wait as `settle` does, and give the memory back."""
        try:
            self.settle()
        finally:
            self.buffers.clear()
            self._own = None

    def _guard(self, own: Ranks, work: Saving) -> tuple[Path, list[str]]:
        try:
            return work(own)
        except CheckpointingError:
            raise  # all ranks have agreed on it
        except BaseException as error:
            # The others may be waiting for this rank, and would until their timeout.
            self._own = None
            if own.comm.size > 1:
                own.comm.abort(error)
            raise


def _report(untold: list[str]) -> None:
    for text in untold:
        warnings.warn(text, CheckpointingWarning, stacklevel=2)
