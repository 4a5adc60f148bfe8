"""Files below a folder, and what tells their content from other content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

BLOCK = 1 << 24
"""Bytes read at once."""

PASSED_OVER = {"__pycache__", "site-packages", "dist-packages"}


def files_below(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder in order of their relative names.

    Hidden ones, and those of ``__pycache__`` and ``site-packages``, are passed over.
    """
    found = []
    for path in folder.rglob(pattern):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") or part in PASSED_OVER for part in parts)
        if not hidden and path.is_file():
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def relative_name(path: Path, root: Path) -> str:
    """Return the name of a file below a folder; of the folder itself if it is a file, its name."""
    return path.name if path == root else path.relative_to(root).as_posix()


def fingerprint_of(files: Iterable[Path], root: Path) -> str:
    """Return the SHA-256 of names and contents, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in files:
        name = relative_name(path, root).encode()
        digest.update(b"%d %s %d\n" % (len(name), name, path.stat().st_size))
        for block in blocks_of(path):
            digest.update(block)
    return digest.hexdigest()


def blocks_of(path: Path) -> Iterator[bytes]:
    """Read a file block by block."""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block
