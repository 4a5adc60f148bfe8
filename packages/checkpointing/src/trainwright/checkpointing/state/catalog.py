"""Which checkpoints a folder holds: found by looking, so that no pointer can be wrong."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from trainwright.checkpointing.errors import DamagedCheckpointError, NoCheckpointError
from trainwright.checkpointing.protocol import Files

from .manifest import Manifest, read_manifest

_COMMITTED = re.compile(r"step-[0-9]{8,}-[0-9a-f]{8}")
_PASSING = re.compile(r"\.(?:saving|removing)-(step-[0-9]{8,}-[0-9a-f]{8})-(.+)")


@attrs.frozen
class Saved:
    """A checkpoint that was complete when it got its name, and whose manifest is intact."""

    folder: Path
    manifest: Manifest


@attrs.frozen
class Catalog:
    """All that was found in a folder.

    Args:
        complete: The checkpoints of all runs, in the order of saving. The rename that gave one its
            name came after all else, so none of its files is looked at here.
        broken: (folder, reason) of what bears a checkpoint's name and has no sound manifest.
        passing: (folder, run) of what a save or a removal was busy with when it ended, or still is.
        last_sequence: The highest number of any manifest that could be read; 0 if there is none.
    """

    complete: tuple[Saved, ...]
    broken: tuple[tuple[Path, str], ...]
    passing: tuple[tuple[Path, str], ...]
    last_sequence: int

    def of_run(self, run: str | None) -> tuple[Saved, ...]:
        """Return the complete checkpoints of one run, or with None of all."""
        return tuple(saved for saved in self.complete if run in (None, saved.manifest.run))

    def choose(self, run: str | None, step: int | None, root: Path) -> Saved:
        """Return the newest checkpoint, of ``step`` if one is named.

        Raises:
            NoCheckpointError: There is none; the message says what there is.
        """
        for saved in reversed(self.of_run(run)):
            if step in (None, saved.manifest.step):
                return saved
        raise NoCheckpointError(self.describe_lack(run, step, root))

    def describe_lack(self, run: str | None, step: int | None, root: Path) -> str:
        """Return that there is no such checkpoint, and what there is."""
        wanted = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
        of_run = "" if run is None else f" of run {run!r}"
        broken = {folder: f"{folder.name} ({reason})" for folder, reason in self.broken}
        there = [
            f"step {saved.manifest.step} of run {saved.manifest.run!r}"
            for saved in self.complete
            if saved.folder not in broken
        ]
        return (
            f"{root} holds no {wanted}{of_run}; complete: {', '.join(there[-10:]) or 'none'}; "
            f"incomplete: {', '.join([*broken.values()][-10:]) or 'none'}"
        )


def read_catalog(files: Files, root: Path, known: dict[str, Manifest] | None = None) -> Catalog:
    """Look at every folder in ``root``.

    Args:
        files: The file system.
        root: The folder.
        known: The manifests by name of folder that were read before, which are not read again; to
            be kept for the next time. A checkpoint never changes, but damage done to its manifest
            meanwhile is not seen.

    Raises:
        OSError: ``root`` is there and cannot be listed.
    """
    complete: list[Saved] = []
    broken: list[tuple[Path, str]] = []
    passing: list[tuple[Path, str]] = []
    last_sequence = 0
    before = {} if known is None else dict(known)
    read: dict[str, Manifest] = {}
    for name in sorted(files.names(root)):
        folder = root / name
        match = _PASSING.fullmatch(name)
        if match:
            passing.append((folder, match[2]))
        if not _COMMITTED.fullmatch(name):
            continue
        try:
            manifest = before.get(name) or read_manifest(files, folder)
            if not name.startswith(committed_name(manifest.step, "")):
                raise DamagedCheckpointError(
                    f"{folder} is damaged: its manifest is that of step {manifest.step}"
                )
            read[name] = manifest
            last_sequence = max(last_sequence, manifest.sequence)
            complete.append(Saved(folder, manifest))
        except (OSError, DamagedCheckpointError) as error:
            broken.append((folder, f"{type(error).__name__}: {error}"))
    if known is not None:
        known.clear()
        known.update((name, attrs.evolve(manifest, plain={})) for name, manifest in read.items())
    complete.sort(key=lambda saved: saved.manifest.sequence)
    return Catalog(tuple(complete), tuple(broken), tuple(passing), last_sequence)


def check_length(files: Files, path: Path, expected: int) -> None:
    """Raise unless a file is there at its full length.

    Raises:
        OSError: It cannot be looked at.
        DamagedCheckpointError: It is missing, or has another length.
    """
    try:
        found = files.size(path)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is damaged: it is not there") from error
    if found != expected:
        raise DamagedCheckpointError(
            f"{path} is damaged: length: expected {expected}, found {found}"
        )


def committed_name(step: int, token: str) -> str:
    """Return the name of a complete checkpoint's folder; ``token``: 8 hexadecimal digits."""
    return f"step-{step:08d}-{token}"


def saving_name(name: str, run: str) -> str:
    """Return the name of the folder while the checkpoint is being written."""
    return f".saving-{name}-{run}"


def removing_name(name: str, run: str) -> str:
    """Return the name of the folder while the checkpoint is being removed."""
    return f".removing-{name}-{run}"


def remove_checkpoint(files: Files, folder: Path, run: str) -> None:
    """Remove a complete checkpoint, or what a save or a removal has left of one.

    It first gets a name under which nobody, not even the save that made it and may still be alive,
    takes it for a checkpoint or makes it one.

    Raises:
        OSError: It cannot be removed.
    """
    match = _PASSING.fullmatch(folder.name)
    passing = folder.with_name(removing_name(match[1] if match else folder.name, run))
    if folder != passing:
        files.rename(folder, passing)
        files.sync_folder(folder.parent)  # a crash could else bring back an emptied folder's name
    files.remove_folder(passing)
