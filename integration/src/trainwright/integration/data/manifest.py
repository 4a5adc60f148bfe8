"""The manifest of prepared data: which files hold which part, and what tells it from other data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trainwright.integration.aside import write_aside
from trainwright.integration.data.dataset import Dataset
from trainwright.integration.data.learned import FILE, LearnedTokenizer, make_tokenizer
from trainwright.integration.data.token_file import map_token_file, sync_folder
from trainwright.integration.data.tokenizer import Tokenizer
from trainwright.integration.data.tokens import BLOCK, Tokens
from trainwright.integration.errors import DataError

FORMAT = "trainwright-data-1"
MANIFEST = "manifest.json"
TRAIN, HELD_OUT = "train", "held-out"


def _strings(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


@attrs.frozen
class SourceEntry:
    """Where the tokens of one source are.

    Args:
        source: where it was read from, for messages.
        weight: its share, relative to others, as a fraction.
        role: ``train``, or ``held-out`` where all of it is held out.
        place: what the names of its token files begin with; a folder of prepared data; or a file of
            tokens without a header.
        parts: parts that it has, ``train`` and perhaps ``held-out``.
        dtype: kind of tokens, little-endian, of a file without a header.
        tokens: as many it has.
        cut: as many of these are trained on, the others held out.
        ends: file with the places where its documents end; None where they are not listed.
        files: number of files that were read.
        skipped: names of files that were left out.
    """

    source: str
    weight: str
    role: str
    place: str
    parts: tuple[str, ...] = attrs.field(default=(TRAIN,), converter=_strings)
    dtype: str | None = None
    tokens: int = 0
    cut: int = 0
    ends: str | None = None
    files: int = 1
    skipped: tuple[str, ...] = attrs.field(default=(), converter=_strings)

    def open(self, folder: Path, end_token: int | None) -> dict[str, Tokens]:
        """Map the parts of the source.

        Raises:
            DataError: a file is missing, truncated or another.
        """
        names = {TRAIN: "data", HELD_OUT: "held-out part"}
        place = folder / self.place
        if self.dtype is not None:
            return self._map_headless(place, folder, end_token)
        if place.is_dir():
            data = read_manifest(place).open(place)
            held_out = dict(zip((HELD_OUT,), data.held_out, strict=False))
            return {TRAIN: data.train[0], **held_out}
        return {
            part: map_token_file(token_path(place, part), names[part], end_token)
            for part in self.parts
        }

    def _map_headless(self, place: Path, folder: Path, end: int | None) -> dict[str, Tokens]:
        try:
            mapped = np.memmap(place, dtype=np.dtype(self.dtype), mode="r")
            ends = None if self.ends is None else np.load(folder / self.ends, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"cannot map the tokens of {place}: {error}") from error
        if len(mapped) != self.tokens:
            raise DataError(
                f"{place} had {self.tokens} tokens when it was looked at, and now {len(mapped)}"
            )
        first = second = None
        if ends is not None:
            number = int(np.searchsorted(ends, self.cut, side="right"))
            first, second = ends[:number], ends[number:] - self.cut
        parts = {TRAIN: Tokens(mapped[: self.cut], first, end)}
        if self.cut < self.tokens:
            parts[HELD_OUT] = Tokens(mapped[self.cut :], second, end, what="held-out part")
        return parts


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

    key: str
    checksum: str
    tokenizer: str
    end_token: str | None
    packing: str
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

    def open(self, folder: Path) -> Dataset:
        """Map the data.

        Raises:
            DataError: a file is missing, truncated or another.
        """
        tokenizer = self.read_tokenizer(folder)
        train, held_out, weights = [], [], []
        for entry in self.entries:
            parts = entry.open(folder, tokenizer.end)
            if entry.role == HELD_OUT:
                held_out.append(attrs.evolve(parts[TRAIN], what="held-out part"))
                continue
            train.append(parts[TRAIN])
            weights.append(Fraction(entry.weight))
            held_out += [parts[HELD_OUT]] if HELD_OUT in parts else []
        return Dataset(
            train=tuple(train),
            held_out=tuple(held_out),
            weights=tuple(weights),
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
            content = (folder / FILE).read_text(encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot read the tokenizer of the data: {error}") from error
        return LearnedTokenizer(content, end=self.end_token, where=str(folder / FILE))

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
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != FORMAT:
            raise DataError(f"{path} is not of format {FORMAT}")
        entries = tuple(SourceEntry(**entry) for entry in values.pop("entries"))
        return Manifest(entries=entries, **values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder} holds no prepared data: {error}") from error


def token_path(place: Path, part: str) -> Path:
    """Return the token file of a part of a source."""
    return place.with_name(f"{place.name}.{part}.safetensors")


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
