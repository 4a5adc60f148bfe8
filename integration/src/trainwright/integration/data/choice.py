"""What to read, how, and in which shares: the choices a person makes about data."""

from __future__ import annotations

import os
import re
import sysconfig
from fractions import Fraction
from pathlib import Path

import attrs

from trainwright.integration.data.manifest import MANIFEST
from trainwright.integration.data.sources.files import walk
from trainwright.integration.data.sources.jsonl import SUFFIXES, json_lines
from trainwright.integration.data.sources.megatron import prefix_of
from trainwright.integration.data.sources.nanogpt import TOKEN_DTYPES
from trainwright.integration.data.sources.record import Source
from trainwright.integration.data.sources.tables import parquet_files, saved_dataset
from trainwright.integration.data.sources.text import TextFiles
from trainwright.integration.data.tokenizer import BYTES
from trainwright.integration.data.tokens import PACKINGS
from trainwright.integration.errors import ConfigError, DataError

TEXTUAL = ("text", "jsonl", "parquet", "datasets")
TOKENISED = ("nanogpt", "megatron", "tokens")
FORMATS = ("auto", *TEXTUAL, *TOKENISED)
HELD_OUT_SHARE = 0.05
_DIGITS = r"[0-9]{1,18}"
_WEIGHT = re.compile(
    rf"({_DIGITS}(\.[0-9]{{0,18}})?|\.{_DIGITS})([eE][+-]?[0-9]{{1,2}})?"
    rf"|{_DIGITS}/[1-9][0-9]{{0,17}}"
)


@attrs.frozen
class WeightedPath:
    """A source of data.

    Args:
        path: a file or a folder; None for the running interpreter's standard library.
        weight: its share relative to others.
    """

    path: Path | None
    weight: Fraction = Fraction(1)

    @property
    def place(self) -> Path:
        """The path, or that of the standard library."""
        return default_source() if self.path is None else self.path


@attrs.frozen
class DataChoice:
    """The data of a run.

    Args:
        data: a path, or several with weights, as in ``web.jsonl@0.7,code@0.3``; None for Python's
            standard library.
        format: one of `FORMATS`; ``auto`` goes by names.
        text_field: name of the field or column with the text.
        chat: whether rows hold conversations under ``messages``, of which answers are learnt.
        tokenizer: ``bytes``, ``bpe:N``, ``ids:N``, or the path of a ``tokenizer.json`` or its
            folder; None for that of tokenised data, else bytes.
        end_token: name of the token behind each document; None for what the tokenizer says.
        packing: one of `PACKINGS`.
        held_out: path of what is held out; None for a share of the data.
        held_out_share: that share; 0 for nothing.
        token_dtype: kind of the tokens in nanoGPT's files.

    Raises:
        ConfigError: a value is none of those that are known, or has no effect.
    """

    data: str | None = None
    format: str = "auto"
    text_field: str = "text"
    chat: bool = False
    tokenizer: str | None = None
    end_token: str | None = None
    packing: str = "stream"
    held_out: str | None = None
    held_out_share: float = HELD_OUT_SHARE
    token_dtype: str = "uint16"

    def __attrs_post_init__(self) -> None:
        for name, known in (
            ("format", FORMATS),
            ("packing", PACKINGS),
            ("token_dtype", TOKEN_DTYPES),
        ):
            value = getattr(self, name)
            if value not in known:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} must be one of {', '.join(known)}, got {value}")
        if not 0 <= self.held_out_share < 1:
            raise ConfigError(
                f"--held-out-share must be from 0 to below 1, got {self.held_out_share}"
            )
        if self.held_out is not None and self.held_out_share not in (0.0, HELD_OUT_SHARE):
            raise ConfigError(
                f"--held-out-share {self.held_out_share} has no effect with --held-out "
                f"{self.held_out}, all of which is held out; leave one out"
            )
        if self.tokenizer in (None, BYTES) and self.end_token is not None:
            raise ConfigError("--end-token has no effect on bytes: the zero byte ends documents")
        if self.chat and self.format == "text":
            raise ConfigError("--chat reads rows with messages; --format text has none")
        parse_paths(self.data)

    @property
    def paths(self) -> tuple[WeightedPath, ...]:
        """The sources and their weights."""
        return parse_paths(self.data)


def default_source() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def parse_paths(text: str | None) -> tuple[WeightedPath, ...]:
    """Return the sources that an option names.

    Args:
        text: one path; or ``PATH@WEIGHT`` several times, with commas between them. What exists
            under the whole name is one path, whatever characters it has.

    Raises:
        ConfigError: a weight is missing or no positive number.
    """
    if text is None:
        return (WeightedPath(None),)
    parts = text.split(",")
    # Of a name that no file can have this says no, where others raise.
    if os.path.exists(text) or (len(parts) == 1 and "@" not in text):
        return (WeightedPath(Path(text)),)
    found = []
    for part in parts:
        path, mark, weight = part.rpartition("@")
        if not mark or not path:
            raise ConfigError(
                f"--data {text}: several sources are given as PATH@WEIGHT,PATH@WEIGHT, "
                f"and {part!r} has no weight"
            )
        found.append(WeightedPath(Path(path), _weight(weight, text)))
    return tuple(found)


def _weight(weight: str, text: str) -> Fraction:
    # Of 1e999999999 the digits alone would fill the memory.
    value = Fraction(weight) if _WEIGHT.fullmatch(weight) else Fraction(0)
    if value <= 0:
        raise ConfigError(
            f"--data {text}: weight {weight!r} must be a positive number of a few digits, such as "
            "0.7 or 1/3"
        )
    return value


def format_of(path: Path, asked: str = "auto") -> str:
    """Return the format of a source.

    Args:
        path: a file or a folder.
        asked: what was asked for; ``auto`` goes by names: of the file, or of those in the folder
            where all others are ``.md``.
    """
    if asked != "auto":
        return asked
    if os.path.isdir(path):
        return _format_of_folder(path)
    if _format_of_name(path.name) != "text":
        return _format_of_name(path.name)
    if path.suffix == ".idx" or os.path.isfile(f"{prefix_of(path)}.idx"):
        return "megatron"
    return "nanogpt" if path.suffix == ".bin" else "text"


def _format_of_folder(folder: Path) -> str:
    if os.path.isfile(folder / MANIFEST):
        return "tokens"
    if os.path.isfile(folder / "state.json") or os.path.isfile(folder / "dataset_dict.json"):
        return "datasets"
    kinds = set()
    for file in walk(folder):
        if file.suffix != ".md":
            kinds.add(_format_of_name(file.name))
        if len(kinds) > 1 or "text" in kinds:
            return "text"
    return kinds.pop() if kinds else "text"


def _format_of_name(name: str) -> str:
    if name.endswith(SUFFIXES):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def open_source(path: WeightedPath, choice: DataChoice) -> Source:
    """Return what goes through the records of a source of text.

    Raises:
        DataError: it is missing, empty, or of another format.
    """
    place, kind = path.place, format_of(path.place, choice.format)
    column = "messages" if choice.chat and choice.text_field == "text" else choice.text_field
    if kind == "jsonl":
        return json_lines(place, column, chat=choice.chat)
    if kind == "parquet":
        return parquet_files(place, column, chat=choice.chat)
    if kind == "datasets":
        return saved_dataset(place, column, chat=choice.chat)
    if choice.chat:
        raise DataError(f"--chat reads rows with messages, and {place} is of format {kind}")
    bytes_only = choice.tokenizer in (None, BYTES)
    pattern = "*.py" if path.path is None else "*"
    return TextFiles(place, pattern, whole_characters=not bytes_only)
