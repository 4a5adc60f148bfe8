"""Files that are there as a whole or as they were before."""

from __future__ import annotations

from pathlib import Path


def write_aside(path: Path, text: str) -> None:
    """Write a text beside its place, then let it take the place.

    One process at a time writes a path so.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
