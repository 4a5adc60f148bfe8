"""What is computed from a value once, for all who ask."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Found = TypeVar("Found")


class Memo:
    """Results of pure functions of the value that holds it; it lives as long as that."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def once(self, key: Hashable, compute: Callable[[], Found]) -> Found:
        """Return what ``compute`` gave when first asked for with this key."""
        if key not in self._found:
            self._found[key] = compute()
        found: Found = self._found[key]
        return found
