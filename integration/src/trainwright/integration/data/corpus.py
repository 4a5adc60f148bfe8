"""Text files as one stream of byte tokens, a share of the files held out."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import attrs
import numpy as np

from trainwright.integration.errors import DataError

HELD_OUT_SHARE = 0.05
SEPARATOR = b"\0"
"""Stands after each file: text holds no zero byte, so the model learns where files end."""


@attrs.frozen(eq=False)
class Corpus:
    """Training and held-out bytes.

    Args:
        train: uint8 [n], training files one after another, each followed by a zero byte.
        held_out: uint8 [k], the files (or, of a single file, the last bytes) kept for evaluation.
        files: number of text files read.
        skipped: names of files in the folder that are not text, and were left out.
        source: the file or folder that was read.
    """

    train: np.ndarray
    held_out: np.ndarray
    files: int
    skipped: tuple[str, ...]
    source: str

    @property
    def checksum(self) -> str:
        """SHA-256 of what is trained on and of what is held out, as hexadecimal digits."""
        digest = hashlib.sha256(len(self.train).to_bytes(8, "little"))
        digest.update(self.train.data)
        digest.update(self.held_out.data)
        return digest.hexdigest()


def default_source() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_corpus(source: Path, pattern: str = "*", held_out_share: float = HELD_OUT_SHARE) -> Corpus:
    """Read a text file, or every text file below a folder in order of its relative name.

    Which files are held out depends on their relative names alone; at least one file is, and at
    least one is not. Of a single file the last bytes are held out.

    Args:
        source: a file, or a folder; hidden folders, ``__pycache__`` and ``site-packages`` in it
            are passed over.
        pattern: shell pattern of the file names that count in a folder.
        held_out_share: share of the files (or bytes) held out, between 0 and 1.

    Raises:
        DataError: the path is missing, empty or holds no text.
    """
    if not source.exists():
        raise DataError(f"data path {source} does not exist; give a text file or a folder of them")
    if source.is_file():
        return _single_file(source, held_out_share)
    texts: dict[str, bytes] = {}
    skipped = []
    for path in _files_below(source, pattern):
        content = path.read_bytes()
        name = path.relative_to(source).as_posix()
        if _is_text(content):
            texts[name] = content
        elif content:
            skipped.append(name)
    if not texts:
        reason = "holds only binary files" if skipped else "holds no file with text"
        raise DataError(f"data folder {source} {reason} (names like {pattern}); give text files")
    if len(texts) == 1:
        return _single_file(source / next(iter(texts)), held_out_share)
    held = _held_out_names(list(texts), held_out_share)
    return Corpus(
        train=_join([text for name, text in texts.items() if name not in held]),
        held_out=_join([text for name, text in texts.items() if name in held]),
        files=len(texts),
        skipped=tuple(skipped),
        source=str(source),
    )


def _single_file(path: Path, held_out_share: float) -> Corpus:
    content = path.read_bytes()
    if not content:
        raise DataError(f"data file {path} is empty; give a file with text")
    if not _is_text(content):
        raise DataError(f"data file {path} is binary, not text; give a text file")
    cut = len(content) - int(len(content) * held_out_share)
    return Corpus(
        train=_join([content[:cut]]),
        held_out=_join([content[cut:]]),
        files=1,
        skipped=(),
        source=str(path),
    )


def _files_below(folder: Path, pattern: str) -> list[Path]:
    passed_over = {"__pycache__", "site-packages", "dist-packages"}
    found = []
    for path in folder.rglob(pattern):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") or part in passed_over for part in parts)
        if not hidden and path.is_file():
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _is_text(content: bytes) -> bool:
    if not content or b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _held_out_names(names: list[str], share: float) -> set[str]:
    # A draw by name, not by position: adding a file moves no other file between the two parts.
    ordered = sorted(names, key=_draw)
    held = [name for name in ordered if _draw(name) < share] or ordered[:1]
    return set(held[: len(names) - 1])


def _draw(name: str) -> float:
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "little") / 2**64


def _join(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(text + SEPARATOR for text in texts), dtype=np.uint8)
