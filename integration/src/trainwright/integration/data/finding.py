"""The sources of a choice of data, and what tells their content from other content."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import attrs

from trainwright.integration.data.choice import (
    HELD_OUT_SHARE,
    TOKENISED,
    DataChoice,
    WeightedPath,
    format_of,
    open_source,
)
from trainwright.integration.data.learned import make_tokenizer
from trainwright.integration.data.manifest import read_manifest
from trainwright.integration.data.source_entry import HELD_OUT, TRAIN
from trainwright.integration.data.sources.files import fingerprint_of, glimpse_of
from trainwright.integration.data.sources.megatron import prefix_of
from trainwright.integration.data.sources.record import Source
from trainwright.integration.errors import ConfigError, DataError
from trainwright.integration.values import option

GLIMPSE = "glimpse.txt"


@attrs.frozen(eq=False)
class Found:
    """A source of a run.

    Args:
        path: where it is, and its weight.
        kind: its format.
        role: ``train``, or ``held-out`` where all of it is held out.
        text: what goes through its records; None where it is tokens already.
    """

    path: WeightedPath
    kind: str
    role: str
    text: Source | None

    @property
    def place(self) -> Path:
        """Where it is, from the root."""
        return self.path.place.absolute()


def find_sources(choice: DataChoice) -> list[Found]:
    """Look for the data without reading it.

    Raises:
        DataError: a source is missing or of another format.
        ConfigError: an option has no effect on data of these formats.
    """
    paths = [(path, TRAIN) for path in choice.paths]
    if choice.held_out is not None:
        paths.append((WeightedPath(Path(choice.held_out)), HELD_OUT))
    found = []
    for path, role in paths:
        kind = format_of(path.place, choice.format)
        text = None if kind in TOKENISED else open_source(path, choice)
        if text is None and choice.chat:
            raise DataError(f"--chat reads rows with messages, and {path.place} holds tokens")
        found.append(Found(path, kind, role, text))
    without = unused_in(choice, {each.kind for each in found})
    if without:
        raise ConfigError(
            "; ".join(
                f"{option(name)} {getattr(choice, name)} {why}" for name, why in without.items()
            )
        )
    return found


def unused_in(choice: DataChoice, kinds: set[str]) -> dict[str, str]:
    """Return the fields of a choice that say nothing of some formats, each with the reason."""
    found = {}
    shown = " and ".join(sorted(kinds))
    if choice.text_field != "text" and not kinds & {"jsonl", "parquet", "datasets"}:
        found["text_field"] = (
            f"names a field or column of rows, and data of format {shown} has none; leave it out"
        )
    if choice.token_dtype != "uint16" and "nanogpt" not in kinds:
        found["token_dtype"] = (
            f"says what nanoGPT's files hold, and the data is of format {shown}; leave it out"
        )
    if kinds == {"tokens"} and choice.held_out_share not in (0.0, HELD_OUT_SHARE):
        found["held_out_share"] = (
            "has no effect on folders of tokens, which were cut when they were made; leave it out"
        )
    return found


def key_of(choice: DataChoice, sources: list[Found]) -> str:
    """Return what changes wherever the tokens would."""
    described = _described(choice)
    for found in sources:
        described.append([found.kind, found.role, str(found.path.weight), _fingerprint(found)])
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def sources_glimpsed(choice: DataChoice, sources: list[Found]) -> list[Any]:
    """Return what changes where the choice or its sources do, without reading these.

    See `glimpse_of` for what is not noticed.

    Args:
        choice: what was chosen.
        sources: as `find_sources` found them.
    """
    described = _described(choice)
    for found in sources:
        described.append([found.kind, found.role, str(found.path.weight), *_glimpsed(found)])
    return described


def glimpse(seen: list[Any], folder: Path) -> str:
    """Return what changes where the sources do, or the tokens made of them, without reading them.

    Args:
        seen: what `sources_glimpsed` returned.
        folder: where the tokens are.
    """
    # Tables of rows are made of the rest, for the lengths that somebody asks for.
    made = (GLIMPSE, ".rows-")
    kept = sorted(path for path in folder.iterdir() if not any(m in path.name for m in made))
    described = [*seen, glimpse_of(kept, folder)]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _described(choice: DataChoice) -> list[Any]:
    alike = attrs.evolve(choice, data=None, held_out=None)
    if choice.tokenizer is None or not os.path.exists(choice.tokenizer):
        return [attrs.asdict(alike)]
    tokenizer = make_tokenizer(choice.tokenizer, tuple, choice.end_token)
    # What it says of texts counts, not where it is.
    return [attrs.asdict(attrs.evolve(alike, tokenizer=None, end_token=None)), tokenizer.describe()]


def _glimpsed(found: Found) -> tuple[str, str]:
    if found.text is not None:
        return "", glimpse_of(found.text.candidates, found.text.source)
    if found.kind == "tokens":
        files = sorted(path for path in found.place.iterdir() if path.is_file())
        return str(found.place), glimpse_of(files, found.place)
    return str(found.place), glimpse_of(_files_of(found), found.place.parent)


def _fingerprint(found: Found) -> str:
    if found.text is not None:
        return found.text.fingerprint()
    if found.kind == "tokens":
        return f"{found.place} {read_manifest(found.place).checksum}"
    return f"{found.place} {fingerprint_of(_files_of(found), found.place.parent)}"


def _files_of(found: Found) -> list[Path]:
    prefix = prefix_of(found.place)
    pair = [Path(f"{prefix}.idx"), Path(f"{prefix}.bin")]
    return pair if found.kind == "megatron" else [found.place]
