"""Values of strangers in messages: short, and never walked through."""

from __future__ import annotations

from typing import Any


def show(value: Any) -> str:
    """Return a few characters that tell what ``value`` is; containers are not looked into."""
    if isinstance(value, (str, bytes)):
        return repr(value[:80])
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if -(2**70) < value < 2**70 else "a huge integer"
    return f"a {type(value).__name__}"
