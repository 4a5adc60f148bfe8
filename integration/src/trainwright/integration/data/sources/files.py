"""Files below a folder, and what tells their content from other content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

BLOCK = 1 << 24
"""Bytes read at once."""

PASSED_OVER = {"__pycache__", "site-packages", "dist-packages"}


def files_below(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the files of a folder in order of their relative names.

    Hidden ones, and those of ``__pycache__`` and ``site-packages``, are passed over.
    """
    found = [path for path in walk(folder) if fnmatchcase(path.name, pattern)]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def walk(folder: Path) -> Iterator[Path]:
    """Go through the files of a folder that are not passed over, in no order."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [n for n in folders if not n.startswith(".") and n not in PASSED_OVER]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def relative_name(path: Path, root: Path) -> str:
    """Return the name of a file below a folder; of the folder itself if it is a file, its name."""
    return path.name if path == root else path.relative_to(root).as_posix()


def fingerprint_of(files: Iterable[Path], root: Path) -> str:
    """Return the SHA-256 of names and contents, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in files:
        name = relative_name(path, root).encode(errors="surrogateescape")
        digest.update(b"%d %s %d\n" % (len(name), name, path.stat().st_size))
        for block in blocks_of(path):
            digest.update(block)
    return digest.hexdigest()


SAMPLE = 1 << 12
"""Bytes at the begin, the middle and the end of a file that a glimpse takes."""


def glimpse_of(files: Iterable[Path], root: Path) -> str:
    """Return hexadecimal digits that change with what can be seen of files without reading them.

    That is names, sizes, times of the last change, and three short samples. Whoever changes other
    bytes of a file and sets its time back is not noticed; `fingerprint_of` notices.
    """
    digest = hashlib.sha256()
    for path in files:
        about = path.stat()
        name = relative_name(path, root).encode(errors="surrogateescape")
        digest.update(b"%d %s %d %d\n" % (len(name), name, about.st_size, about.st_mtime_ns))
        with path.open("rb") as file:
            for start in (0, about.st_size // 2, max(0, about.st_size - SAMPLE)):
                file.seek(start)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def blocks_of(path: Path) -> Iterator[bytes]:
    """Read a file block by block."""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block
