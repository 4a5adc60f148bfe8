"""What is done to data before ranks start: tokenised once, into files that all of them map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import attrs
import numpy as np

from trainwright.integration.aside import write_aside
from trainwright.integration.data.choice import DataChoice, format_of
from trainwright.integration.data.dataset import Dataset
from trainwright.integration.data.encoding import encoded
from trainwright.integration.data.finding import (
    GLIMPSE,
    Found,
    find_sources,
    glimpse,
    key_of,
    sources_glimpsed,
)
from trainwright.integration.data.headless import headless_entry
from trainwright.integration.data.learned import (
    FILE,
    LearnedTokenizer,
    make_tokenizer,
    vocabulary_of,
)
from trainwright.integration.data.manifest import (
    MANIFEST,
    Manifest,
    checksum_of,
    read_manifest,
)
from trainwright.integration.data.source_entry import HELD_OUT, TRAIN, SourceEntry
from trainwright.integration.data.sources.record import Document, Record, Source
from trainwright.integration.data.token_file import token_path, written_tokens
from trainwright.integration.data.tokenizer import BYTES, Tokenizer
from trainwright.integration.errors import ConfigError, DataError
from trainwright.integration.outside_files import read_text

READING_S = 24 * 3600.0
"""How long ranks wait for the one that reads for all: much text is tokenised for hours."""


def known_vocabulary(choice: DataChoice) -> int:
    """Return how many tokens the model must know, before anything is tokenised.

    Raises:
        ConfigError: the tokenizer is none that is known.
        DataError: data that should have one cannot be read.
    """
    if choice.tokenizer is None:
        own = [p.place for p in choice.paths if format_of(p.place, choice.format) == "tokens"]
        if own:
            return read_manifest(own[0]).read_tokenizer(own[0]).vocabulary
    return vocabulary_of(choice.tokenizer or BYTES, choice.end_token)


def prepare_data(choice: DataChoice, folder: Path) -> Dataset:
    """Tokenise data into a folder; one rank does this.

    Documents are read one after another; none stays in memory. What is tokens already is left where
    it is, and looked through.

    Args:
        choice: what to read, and how.
        folder: where token files go, beside the manifest that `open_data` reads.

    Returns:
        The data; other ranks get the same from `open_data`.

    Raises:
        DataError: data is missing, of another format, or holds tokens outside of the vocabulary.
        ConfigError: the tokenizer cannot be had.
    """
    try:
        sources = find_sources(choice)
        # Looked at before they are read: what changes meanwhile looks new to the next start.
        seen = sources_glimpsed(choice, sources)
        data = _prepare(choice, sources, key_of(choice, sources), folder)
        write_aside(folder / GLIMPSE, glimpse(seen, folder))
        return data
    except OSError as error:
        raise DataError(f"cannot read the data: {error}") from error


def left_there(choice: DataChoice, folder: Path) -> Dataset | None:
    """Return what `prepare_data` has left in a folder, if it is what it would make now, and whole.

    Sources and tokens are read, and their checksums compared, unless all of them look as they did
    when that was done last: see `glimpse_of`.

    Raises:
        DataError: data is missing or of another format.
    """
    if not (folder / MANIFEST).exists():
        return None
    try:
        sources = find_sources(choice)
        seen = glimpse(sources_glimpsed(choice, sources), folder)
        looks_as_before = _read_glimpse(folder) == seen
        key = None if looks_as_before else key_of(choice, sources)
    except OSError as error:
        raise DataError(f"cannot read the data: {error}") from error
    try:
        manifest = read_manifest(folder)
        data = manifest.open(folder)
        if not looks_as_before:
            if manifest.key != key or checksum_of(data) != manifest.checksum:
                return None
            write_aside(folder / GLIMPSE, seen)
        return data
    except (DataError, ConfigError):
        return None


def _read_glimpse(folder: Path) -> str | None:
    try:
        return read_text(folder / GLIMPSE, 1 << 10)
    except (OSError, ValueError):
        return None


def open_data(folder: Path) -> Dataset:
    """Map the data that `prepare_data` has left in a folder.

    Raises:
        DataError: there is none, or a file is missing or truncated.
    """
    return read_manifest(folder).open(folder)


def _prepare(choice: DataChoice, sources: list[Found], key: str, folder: Path) -> Dataset:
    folder.mkdir(parents=True, exist_ok=True)
    # Without it the folder holds nothing, whatever files are in it.
    (folder / MANIFEST).unlink(missing_ok=True)
    tokenizer = _tokenizer_of(choice, sources)
    if isinstance(tokenizer, LearnedTokenizer):
        (folder / FILE).write_text(tokenizer.content, encoding="utf-8")
    share = 0.0 if choice.held_out is not None else choice.held_out_share
    entries = [
        _entry_of(found, choice, tokenizer, folder / str(number), share)
        for number, found in enumerate(sources)
    ]
    manifest = Manifest.of(key, tokenizer, choice.packing, entries)
    data = manifest.open(folder)
    for tokens in (*data.train, *data.held_out):
        tokens.check_vocabulary(tokenizer.vocabulary)
    manifest = attrs.evolve(manifest, checksum=checksum_of(data))
    manifest.write(folder)
    return manifest.open(folder)


def _tokenizer_of(choice: DataChoice, sources: list[Found]) -> Tokenizer:
    own = [
        (found.place, read_manifest(found.place).read_tokenizer(found.place))
        for found in sources
        if found.kind == "tokens"
    ]

    def training() -> Iterator[bytes]:
        share = 0.0 if choice.held_out is not None else choice.held_out_share
        for found in sources:
            if found.text is not None and found.role == TRAIN:
                yield from _texts(found.text.split(share))

    if choice.tokenizer is None and own:
        chosen = own[0][1]
    else:
        chosen = make_tokenizer(choice.tokenizer or BYTES, training, choice.end_token)
    for place, tokenizer in own:
        if tokenizer.describe() != chosen.describe():
            raise ConfigError(
                f"{place} was tokenised with another tokenizer than the rest of the data; "
                "tokenise it anew, or leave --tokenizer out"
            )
    return chosen


def _texts(records: Iterable[tuple[bool, Record]]) -> Iterator[bytes]:
    for held_out, record in records:
        if held_out:
            continue
        if isinstance(record, Document):
            yield from record.pieces
        else:
            yield from (message.content.encode() for message in record.messages)


def _entry_of(
    found: Found, choice: DataChoice, tokenizer: Tokenizer, place: Path, share: float
) -> SourceEntry:
    entry = SourceEntry(
        source=str(found.path.place),
        weight=str(found.path.weight),
        role=found.role,
        place=place.name,
    )
    if found.role == HELD_OUT:
        share = 0.0
    if found.text is not None:
        parts = (TRAIN, HELD_OUT) if share else (TRAIN,)
        _write(found.text, tokenizer, [token_path(place, part) for part in parts], share, choice)
        return attrs.evolve(entry, parts=parts, files=found.text.files, skipped=found.text.skipped)
    if found.kind != "tokens":
        return headless_entry(entry, found.place, found.kind, choice.token_dtype, place, share)
    manifest = read_manifest(found.place)
    data = manifest.open(found.place)
    if checksum_of(data) != manifest.checksum:
        raise DataError(f"the tokens in {found.place} are damaged; tokenise the data anew")
    if found.role == HELD_OUT and data.held_out:
        raise DataError(
            f"--held-out {found.place} has a held-out part of its own; tokenise it with "
            "--held-out-share 0"
        )
    return attrs.evolve(entry, place=str(found.place))


def _write(
    source: Source, tokenizer: Tokenizer, paths: list[Path], share: float, choice: DataChoice
) -> None:
    dtype = np.dtype(tokenizer.dtype)
    with ExitStack() as opened:
        writers = [
            opened.enter_context(written_tokens(path, dtype, counts=choice.chat)) for path in paths
        ]
        for each in encoded(source.split(share), tokenizer):
            writer = writers[each.part.held_out]
            writer.add(each.tokens, counts=each.part.counts)
            if each.part.ends:
                writer.end_document()
