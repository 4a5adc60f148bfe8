"""One source of prepared data: where its tokens are, checked as far as a header can be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trainwright.integration.data.token_file import map_token_file, token_path
from trainwright.integration.data.tokens import Tokens
from trainwright.integration.errors import DataError

TRAIN, HELD_OUT = "train", "held-out"
_FRACTION = re.compile("[0-9]{0,200}[1-9][0-9]{0,200}(/[0-9]{0,200}[1-9][0-9]{0,200})?")

Check = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _strings(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


def must(rule: str, holds: Callable[[Any], bool]) -> Check:
    """Return the check of a field that a file says."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if not holds(value):
            raise ValueError(f"{field.name} must be {rule}, got {value!r:.100}")

    return check


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _are_texts(value: Any) -> bool:
    return all(isinstance(each, str) for each in value)


def _is_whole_kind(value: Any) -> bool:
    try:
        return value is None or (isinstance(value, str) and np.dtype(value).kind in "iu")
    except TypeError:
        return False


TEXT = must("text", lambda value: isinstance(value, str))
TEXT_OR_NONE = must("text or none", lambda value: value is None or isinstance(value, str))
_WHOLE = must("a whole number", _is_whole)
_TEXTS = must("a list of texts", _are_texts)
_ROLE = must(f"{TRAIN} or {HELD_OUT}", lambda value: value in (TRAIN, HELD_OUT))
_PARTS = must(
    f"{TRAIN}, and perhaps {HELD_OUT}", lambda value: value in ((TRAIN,), (TRAIN, HELD_OUT))
)
_WEIGHT = must(
    "a fraction", lambda value: isinstance(value, str) and bool(_FRACTION.fullmatch(value))
)
_KIND = must("a kind of whole numbers", _is_whole_kind)


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

    source: str = attrs.field(validator=TEXT)
    weight: str = attrs.field(validator=_WEIGHT)
    role: str = attrs.field(validator=_ROLE)
    place: str = attrs.field(validator=TEXT)
    parts: tuple[str, ...] = attrs.field(default=(TRAIN,), converter=_strings, validator=_PARTS)
    dtype: str | None = attrs.field(default=None, validator=_KIND)
    tokens: int = attrs.field(default=0, validator=_WHOLE)
    cut: int = attrs.field(default=0, validator=_WHOLE)
    ends: str | None = attrs.field(default=None, validator=TEXT_OR_NONE)
    files: int = attrs.field(default=1, validator=_WHOLE)
    skipped: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_TEXTS)

    def __attrs_post_init__(self) -> None:
        if self.cut > self.tokens:
            raise ValueError(f"cut must be at most tokens={self.tokens}, got {self.cut}")

    def map(self, folder: Path, end_token: int | None) -> dict[str, Tokens]:
        """Map the parts of a source that is no folder of prepared data.

        Raises:
            DataError: a file is missing, truncated or another.
        """
        names = {TRAIN: "data", HELD_OUT: "held-out part"}
        place = folder / self.place
        if self.dtype is not None:
            return self._map_headless(place, folder, end_token)
        return {
            part: map_token_file(token_path(place, part), names[part], end_token)
            for part in self.parts
        }

    def _map_headless(self, place: Path, folder: Path, end: int | None) -> dict[str, Tokens]:
        try:
            mapped = np.memmap(place, dtype=np.dtype(self.dtype), mode="r")
            ends = None if self.ends is None else _mapped_ends(folder / self.ends)
        except (OSError, ValueError, EOFError) as error:
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


def _mapped_ends(path: Path) -> np.ndarray:
    ends = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(ends, np.ndarray) or ends.ndim != 1 or ends.dtype != np.int64:
        raise ValueError(f"{path} lists no ends of documents")
    return ends
