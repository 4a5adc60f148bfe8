"""The journal of interventions: data that outlives restarts, appended before anything is done."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Protocol

import attrs

from trainwright.collectives import Communicator, broadcast_object
from trainwright.stability_guards.errors import JournalError
from trainwright.stability_guards.positions import Positions
from trainwright.stability_guards.protocol import Verdict, check_count


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _check_back_to(instance: object, attribute: attrs.Attribute[int | None], value: object) -> None:
    if value is not None:
        check_count(instance, attribute, value)


@attrs.frozen
class Intervention:
    """What was done at a step, and why.

    Args:
        number: place in the journal, from 0.
        verdict: SKIP, ROLLBACK or HALT.
        step: at which it was said.
        updates: applied until then.
        batch: data positions of that step's batch.
        left_out: positions that are never read again, because of this.
        reason: the guards' words.
        loss: mean loss of the step; None where it was not finite.
        norm: norm of its gradients; None where it was not finite.
        back_to: step of the snapshot that a ROLLBACK restored.
        position: data position from which reading went on.
        attempt: how many rollbacks in succession this is; 0 if it is none.
    """

    number: int = attrs.field(validator=check_count)
    verdict: Verdict = attrs.field(converter=Verdict)
    step: int = attrs.field(validator=check_count)
    updates: int = attrs.field(validator=check_count)
    batch: Positions
    left_out: Positions
    reason: str = attrs.field(validator=attrs.validators.instance_of(str))
    loss: float | None = attrs.field(default=None, converter=_finite)
    norm: float | None = attrs.field(default=None, converter=_finite)
    back_to: int | None = attrs.field(default=None, validator=_check_back_to)
    position: int = attrs.field(default=0, validator=check_count)
    attempt: int = attrs.field(default=0, validator=check_count)

    def as_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads."""
        data = attrs.asdict(self, recurse=False)
        data["verdict"] = self.verdict.name
        data["batch"] = self.batch.as_json()
        data["left_out"] = self.left_out.as_json()
        return data

    @classmethod
    def from_json(cls, data: Any) -> Intervention:
        """Return the intervention that `as_json` gave.

        Raises:
            JournalError: the data is something else.
        """
        try:
            return cls(
                **{
                    **data,
                    "verdict": Verdict[data["verdict"]],
                    "batch": Positions.from_json(data["batch"]),
                    "left_out": Positions.from_json(data["left_out"]),
                }
            )
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise JournalError(f"this is no intervention: {error}") from error


class Journal(Protocol):
    """An append-only list of interventions, the same on every rank.

    Law: what ``append`` has returned for is in ``entries`` for ever, also after a crash.
    """

    @property
    def entries(self) -> tuple[Intervention, ...]:
        """All interventions, oldest first."""
        ...

    def append(self, entry: Intervention) -> None:
        """Add one whose number is that of the entries before it; safe when it returns."""
        ...


def left_out(journal: Journal) -> Positions:
    """Return the skip list: every position that an intervention has left out."""
    spans = [span for entry in journal.entries for span in entry.left_out.spans]
    return Positions(spans)


class MemoryJournal:
    """A journal that ends with the process, for tests and for ranks that do not write."""

    def __init__(self, entries: tuple[Intervention, ...] = ()) -> None:
        self._entries = list(entries)

    @property
    def entries(self) -> tuple[Intervention, ...]:
        """All interventions, oldest first."""
        return tuple(self._entries)

    def append(self, entry: Intervention) -> None:
        """Add one.

        Raises:
            JournalError: its number is not the next one.
        """
        _check_number(entry, len(self._entries))
        self._entries.append(entry)


class FileJournal:
    """A journal in a file of one JSON object a line, synced to disk at each entry.

    A last line that a crash has torn is no entry, and the next one takes its place: nothing was
    done for it yet. Any other line that
    cannot be read is an error, because what it left out would be trained on.

    Args:
        path: the file; it is made by the first entry, its folder must be there.

    Raises:
        JournalError: a line is damaged or out of order.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._size = 0
        self._memory = MemoryJournal(self._read())

    @property
    def entries(self) -> tuple[Intervention, ...]:
        """All interventions, oldest first."""
        return self._memory.entries

    def append(self, entry: Intervention) -> None:
        """Write one; it is on disk when this returns.

        Raises:
            JournalError: its number is not the next one, or somebody has removed or shortened the
                file, which would lose what was left out.
            OSError: it could not be written; the next entry takes its place.
        """
        _check_number(entry, len(self.entries))
        self._check_whole()
        line = json.dumps(entry.as_json(), allow_nan=False).encode() + b"\n"
        is_new = not self._path.exists()
        with self._path.open("wb" if is_new else "r+b") as file:
            # What a crash or a failed append has left goes first: no line behind it could be read.
            file.truncate(self._size)
            file.seek(self._size)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(self._path.parent)
        self._size += len(line)
        self._memory.append(entry)

    def _check_whole(self) -> None:
        found = self._path.stat().st_size if self._path.exists() else 0
        if found < self._size:
            raise JournalError(
                f"{self._path} has {found} of the {self._size} bytes that were written: put it "
                "back, for what it left out must not be trained on"
            )

    def _read(self) -> tuple[Intervention, ...]:
        if not self._path.exists():
            return ()
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        self._size = whole
        found = []
        for number, line in enumerate(content[:whole].splitlines()):
            try:
                entry = Intervention.from_json(json.loads(line))
                _check_number(entry, number)
            except (ValueError, RecursionError) as error:
                raise JournalError(
                    f"line {number + 1} of {self._path} cannot be read ({error}); mend it: what it "
                    "left out must not be trained on"
                ) from error
            found.append(entry)
        return tuple(found)


class SharedJournal:
    """The journal of all ranks: rank 0 has the file, the others follow.

    Every rank appends the same entries, because they follow from the same reports.

    Args:
        communicator: all ranks.
        written: the journal in the file, on rank 0; None on the others.
        entries: what was in it.
    """

    def __init__(
        self,
        communicator: Communicator,
        written: Journal | None,
        entries: tuple[Intervention, ...],
    ) -> None:
        self._communicator = communicator
        self._written = written
        self._memory = MemoryJournal(entries)

    @property
    def entries(self) -> tuple[Intervention, ...]:
        """All interventions, oldest first."""
        return self._memory.entries

    def append(self, entry: Intervention) -> None:
        """Add one; it is on disk when this returns, on whichever rank.

        Raises:
            JournalError: it is not, because of rank 0's disk as well; on every rank alike. The next
                entry takes its place.

        Communicates: one broadcast of what rank 0 has to say.
        """
        problem = ""
        if self._written is not None:
            try:
                self._written.append(entry)
            except (JournalError, OSError) as error:
                problem = str(error) or type(error).__name__
        problem = broadcast_object(self._communicator, problem, root=0)
        if problem:
            raise JournalError(
                f"rank 0 could not journal what is to be done at step {entry.step}: {problem}"
            )
        self._memory.append(entry)


def shared_journal(path: Path | str, communicator: Communicator) -> SharedJournal:
    """Return the journal of all ranks, which rank 0 reads from the file and writes to it.

    Raises:
        JournalError: the file is damaged; on every rank alike.

    Communicates:
        One broadcast of the entries.
    """
    mine: Journal | None = None
    told: tuple[tuple[Intervention, ...], str] = ((), "")
    if communicator.rank == 0:
        try:
            mine = FileJournal(path)
            told = (mine.entries, "")
        except (JournalError, OSError) as error:
            told = ((), str(error))
    entries, problem = broadcast_object(communicator, told, root=0)
    if problem:
        raise JournalError(problem)
    return SharedJournal(communicator, mine, entries)


def _check_number(entry: Intervention, expected: int) -> None:
    if entry.number != expected:
        raise JournalError(f"the next intervention has number {expected}, got {entry.number}")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
