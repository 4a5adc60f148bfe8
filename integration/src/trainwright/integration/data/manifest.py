"""The manifest of prepared data: which files hold which part, and what tells it from other data."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trainwright.integration.aside import write_aside
from trainwright.integration.data.dataset import Dataset
from trainwright.integration.data.learned import (
    FILE,
    LearnedTokenizer,
    make_tokenizer,
    read_tokenizer,
)
from trainwright.integration.data.source_entry import (
    HELD_OUT,
    TEXT_OR_NONE,
    TRAIN,
    SourceEntry,
    must,
)
from trainwright.integration.data.token_file import sync_folder
from trainwright.integration.data.tokenizer import BYTES, Tokenizer
from trainwright.integration.data.tokens import BLOCK, PACKINGS, Tokens
from trainwright.integration.errors import ConfigError, DataError
from trainwright.integration.outside_files import read_object

FORMAT = "trainwright-data-1"
MANIFEST = "manifest.json"
MOST_BYTES = 1 << 28
"""It lists the files that were left out."""

DEEPEST = 8
"""Prepared data may be another folder's, and that another's, but none is its own."""

_TOKENIZER = re.compile(rf"{BYTES}|ids:[0-9]{{1,10}}|{re.escape(FILE)}")
_DIGITS = re.compile("([0-9a-f]{64})?")


def _texts_like(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and bool(pattern.fullmatch(value))


@attrs.frozen
class Manifest:
    """What a folder of prepared data holds.

    Args:
        key: what it was made of, and how.
        checksum: of the data.
        tokenizer: ``bytes``, ``ids:N``, or ``tokenizer.json`` for the file of that name.
        end_token: name of the token behind each document, where the tokenizer is a file.
        packing: how documents lie in sequences.
        entries: the sources.
    """

    key: str = attrs.field(validator=must("a checksum", _texts_like(_DIGITS)))
    checksum: str = attrs.field(validator=must("a checksum", _texts_like(_DIGITS)))
    tokenizer: str = attrs.field(
        validator=must(f"{BYTES}, ids:N or {FILE}", _texts_like(_TOKENIZER))
    )
    end_token: str | None = attrs.field(validator=TEXT_OR_NONE)
    packing: str = attrs.field(
        validator=must(f"one of {', '.join(PACKINGS)}", lambda value: value in PACKINGS)
    )
    entries: tuple[SourceEntry, ...]

    @classmethod
    def of(
        cls, key: str, tokenizer: Tokenizer, packing: str, entries: list[SourceEntry]
    ) -> Manifest:
        """Describe sources and their tokenizer; the checksum is yet to be computed."""
        learned = isinstance(tokenizer, LearnedTokenizer)
        return cls(
            key=key,
            checksum="",
            tokenizer=FILE if learned else tokenizer.describe(),
            end_token=tokenizer.end_name if isinstance(tokenizer, LearnedTokenizer) else None,
            packing=packing,
            entries=tuple(entries),
        )

    def open(self, folder: Path, depth: int = 0) -> Dataset:
        """Map the data.

        Args:
            folder: where it is.
            depth: folders whose data this one is.

        Raises:
            DataError: a file is missing, truncated or another.
        """
        tokenizer = self.read_tokenizer(folder)
        train, held_out = [], []
        apart = any(entry.role == HELD_OUT for entry in self.entries)
        for number, entry in enumerate(self.entries):
            found = _parts_of(entry, folder, tokenizer.end, depth)
            parts = {
                part: attrs.evolve(tokens, beside=folder / f"{number}.{part}")
                for part, tokens in found.items()
            }
            weight = Fraction(entry.weight)
            if entry.role == HELD_OUT:
                held_out.append((attrs.evolve(parts[TRAIN], what="held-out part"), weight))
                continue
            train.append((parts[TRAIN], weight))
            if HELD_OUT in parts and not apart:
                held_out.append((parts[HELD_OUT], weight))
        return Dataset(
            train=tuple(tokens for tokens, _ in train),
            held_out=tuple(tokens for tokens, _ in held_out),
            weights=tuple(weight for _, weight in train),
            held_out_weights=tuple(weight for _, weight in held_out),
            tokenizer=tokenizer,
            packing=self.packing,
            checksum=self.checksum,
            source=", ".join(entry.source for entry in self.entries),
            files=sum(entry.files for entry in self.entries),
            skipped=tuple(name for entry in self.entries for name in entry.skipped),
        )

    def read_tokenizer(self, folder: Path) -> Tokenizer:
        """Return the tokenizer of the data.

        Raises:
            DataError: its file is missing.
        """
        if self.tokenizer != FILE:
            return make_tokenizer(self.tokenizer, tuple)
        try:
            return read_tokenizer(folder / FILE, self.end_token)
        except ConfigError as error:
            raise DataError(f"cannot read the tokenizer of the data: {error}") from error

    def write(self, folder: Path) -> None:
        """Write it, aside and then renamed; with it the folder holds prepared data."""
        values = {"format": FORMAT, **attrs.asdict(self)}
        write_aside(folder / MANIFEST, json.dumps(values, indent=2) + "\n")
        sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        DataError: there is none, or it is of another format.
    """
    path = folder / MANIFEST
    try:
        values = read_object(path, MOST_BYTES)
        if values.pop("format", None) != FORMAT:
            raise DataError(f"{path} is not of format {FORMAT}")
        entries = tuple(SourceEntry(**entry) for entry in values.pop("entries"))
        found = Manifest(entries=entries, **values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} holds no prepared data: {error}") from error
    if not found.checksum or all(entry.role == HELD_OUT for entry in entries):
        raise DataError(f"{folder} holds no prepared data: it has no checksum, or no source")
    return found


def _parts_of(
    entry: SourceEntry, folder: Path, end_token: int | None, depth: int
) -> dict[str, Tokens]:
    place = folder / entry.place
    if entry.dtype is not None or not os.path.isdir(place):
        return entry.map(folder, end_token)
    if depth == DEEPEST:
        raise DataError(f"{folder} is prepared data of {place}, which is that of another in turn")
    data = read_manifest(place).open(place, depth + 1)
    if len(data.train) > 1:
        raise DataError(
            f"{place} holds data of {len(data.train)} sources; give each one's own folder, with "
            "its weight"
        )
    return {TRAIN: data.train[0], **dict(zip((HELD_OUT,), data.held_out, strict=False))}


def checksum_of(data: Dataset) -> str:
    """Return the SHA-256 of data, as hexadecimal digits.

    Of bytes of one source it is that of their number, of what is trained on and of what is held
    out; of other data, that of all arrays, the weights, the tokenizer and the packing.
    """
    stream = data.byte_stream
    plain = data.packing == "stream" and all(t.counts is None for t in data.train)
    if stream is not None and plain:
        digest = hashlib.sha256(len(stream).to_bytes(8, "little"))
        for tokens in (*data.train, *data.held_out):
            _update(digest, tokens.tokens)
        return digest.hexdigest()
    described: list[Any] = [data.packing, data.tokenizer.describe(), [str(w) for w in data.weights]]
    digest = hashlib.sha256(json.dumps(described).encode())
    for number, tokens in enumerate((*data.train, *data.held_out)):
        for name in ("tokens", "ends", "counts"):
            part = getattr(tokens, name)
            if part is not None:
                digest.update(f"{number} {name} {part.dtype.name} {len(part)}\n".encode())
                _update(digest, part)
    return digest.hexdigest()


def _update(digest: Any, part: np.ndarray) -> None:
    for start in range(0, len(part), BLOCK):
        digest.update(np.ascontiguousarray(part[start : start + BLOCK]).data)
