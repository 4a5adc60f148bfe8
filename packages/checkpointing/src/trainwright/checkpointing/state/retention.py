"""Removes old checkpoints so that a crash at any moment leaves whole ones or none, never halves."""

from __future__ import annotations

from collections.abc import Collection

from trainwright.checkpointing.protocol import Files

from .catalog import Saved, choose_removals, read_catalog, removing_name
from .saving import Place


def rotate(place: Place, run: str, keep: int, protect: Collection[int]) -> None:
    """Remove what `choose_removals` says of the checkpoints of ``run``.

    Raises:
        OSError: One cannot be removed.
    """
    files = place.files
    for saved in choose_removals(read_catalog(files, place.root).of_run(run), keep, protect):
        _remove(files, saved)


def _remove(files: Files, saved: Saved) -> None:
    folder = saved.folder
    passing = folder.with_name(removing_name(folder.name, saved.manifest.run))
    files.rename(folder, passing)
    files.sync_folder(folder.parent)  # else a crash could bring back the name of an emptied folder
    files.remove_folder(passing)
