"""Text that others have written, read whole and within bounds, or refused for a reason in words."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 24
"""A file of settings, or of what a model or a data set is, has less."""


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file, of which never more is read than it may have.

    Args:
        path: the file.
        most_bytes: as many it may have.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: it is longer, no UTF-8, or no file that ends, such as a device.
    """
    # Asked before it is opened, which would wait for whoever writes to a pipe.
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it is longer than {most_bytes} bytes")
    return content.decode("utf-8")


def parse_json(
    text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Return what JSON says.

    Args:
        text: the JSON.
        pairs: what makes a value of an object's keys and values; None makes a dict.

    Raises:
        ValueError: it is no JSON, or nested so deep that nobody means it.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError(f"it is nested too deep: {error}") from error


def read_object(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        OSError: the file is not there, or cannot be read.
        ValueError: it holds something else, or too much.
    """
    found = parse_json(read_text(path, most_bytes))
    if not isinstance(found, dict):
        raise ValueError(f"it must hold a JSON object, got {type(found).__name__}")
    return found


def number(value: object) -> float:
    """Return a plain number, or NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
