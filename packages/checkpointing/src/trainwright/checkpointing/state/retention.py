"""Which checkpoints stay, and how the others go: a crash leaves whole ones, never halves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import attrs

from trainwright.checkpointing.errors import NoCheckpointError, TreeError

from .catalog import Saved, read_catalog, remove_checkpoint
from .saving import Place


def _count(_: Any, field: attrs.Attribute[Any], value: object) -> None:
    if type(value) is not int or value < 1:
        name = "keep" if field.name == "last" else f"keep: {field.name}"
        raise TreeError(f"{name} must be at least 1, or None to keep all, got {value!r}")


@attrs.frozen
class Retention:
    """Which of a run's checkpoints stay when a newer one is complete.

    The newest complete one always stays. Checkpoints of other runs and what is not complete count
    for nothing, and the order is that in which they were saved.

    Args:
        last: How many of those saved last stay.
        every: Steps that it divides stay besides; None: no others.

    Raises:
        TreeError: A number is not from 1.
    """

    last: int = attrs.field(validator=_count)
    every: int | None = attrs.field(default=None, validator=attrs.validators.optional(_count))

    @classmethod
    def of(cls, keep: Retention | int | None) -> Retention | None:
        """Return ``keep`` as a retention: a number is one of the last; None keeps all.

        Raises:
            TreeError: It is none of these.
        """
        return keep if keep is None or isinstance(keep, Retention) else cls(keep)


def take_protected(protect: Collection[int]) -> frozenset[int]:
    """Return the steps that are named; folders could be spelled in many ways.

    Raises:
        TreeError: One is no step.
    """
    steps = tuple(protect) if isinstance(protect, Iterable) else (protect,)
    if not isinstance(protect, Iterable) or any(type(step) is not int for step in steps):
        raise TreeError(f"protect must name steps as integers, got {protect!r}")
    return frozenset(steps)


def choose_removals(
    saved: Sequence[Saved], retention: Retention, protect: Collection[int]
) -> tuple[Saved, ...]:
    """Return what is to be removed, oldest first.

    Args:
        saved: Complete checkpoints of one run, in the order of saving.
        retention: What stays.
        protect: Steps whose newest checkpoint stays besides.
    """
    newest = {entry.manifest.step: entry for entry in saved}

    def stays(entry: Saved) -> bool:
        step = entry.manifest.step
        wanted = step in protect or (retention.every is not None and step % retention.every == 0)
        return wanted and newest[step] is entry

    return tuple(entry for entry in saved[: -retention.last] if not stays(entry))


def rotate(
    place: Place, run: str, retention: Retention, protect: Collection[int], name: str
) -> None:
    """Remove what `choose_removals` says of the checkpoints of ``run``.

    Args:
        place: Where they are.
        run: Whose they are.
        retention: What stays.
        protect: Steps that stay besides.
        name: The folder that was committed just now.

    Raises:
        NoCheckpointError: ``name`` is not seen complete, so that an older one may be the only good
            one: nothing is removed.
        OSError: One cannot be removed.
    """
    files = place.files
    saved = read_catalog(files, place.root).of_run(run)
    if name not in {entry.folder.name for entry in saved}:
        raise NoCheckpointError(f"{place.root / name} was saved just now and is not seen complete")
    for entry in choose_removals(saved, retention, protect):
        remove_checkpoint(files, entry.folder, run)
