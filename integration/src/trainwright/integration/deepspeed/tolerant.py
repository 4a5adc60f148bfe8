"""JSON with comments and commas behind last elements, in which no key stands twice."""

from __future__ import annotations

import json
import re
from typing import Any

from trainwright.integration.settings.files import without_repeats

_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/\*.*?\*/|/\*|\s+|.', re.DOTALL)


def parse_tolerantly(text: str) -> Any:
    """Return the value of a JSON text, which may hold comments and commas behind last elements.

    Comments are ``//`` and ``#`` up to the end of a line and ``/* … */``.

    Raises:
        ValueError: it is something else, such as keys without quotes, or a key stands twice in one
            object; with the line.
    """
    kept: list[str] = []
    signs: list[int] = []  # places of what is neither space nor comment
    for token in _TOKEN.findall(text):
        if token == "/*":
            raise ValueError("a comment is not closed")
        if token.startswith(("//", "#", "/*")):
            # Lines keep their numbers.
            kept.append("".join(sign if sign == "\n" else " " for sign in token))
            continue
        if token in ("]", "}") and _is_behind_an_element(kept, signs):
            kept[signs[-1]] = " "
        if not token.isspace():
            signs.append(len(kept))
        kept.append(token)
    return json.loads("".join(kept), object_pairs_hook=without_repeats)


def _is_behind_an_element(kept: list[str], signs: list[int]) -> bool:
    """Whether the last sign is a comma, and the one before it ends an element."""
    if len(signs) < 2 or kept[signs[-1]] != ",":
        return False
    return kept[signs[-2]] not in ("[", "{", ",", ":")
