"""Counts of the bytes that lie in one place, and what they may be at most."""

from __future__ import annotations

import threading

from trainwright.sharding.offload.errors import OffloadError


class Ledger:
    """Bytes held in one place, now and at most; threads may share it.

    Args:
        place: Its name in messages, such as "the device".
        limit_bytes: What may be held at most; None sets no limit.

    Raises:
        OffloadError: The limit is negative.
    """

    def __init__(self, place: str, limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes < 0:
            raise OffloadError(f"a limit must be at least 0 bytes, got {limit_bytes}")
        self.place = place
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._held = 0
        self._peak = 0

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self._held

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at once since the beginning, or since `reset_peak`."""
        return self._peak

    def reset_peak(self) -> None:
        """Let the peak begin again from what is held now."""
        with self._lock:
            self._peak = self._held

    def check(self, num_bytes: int) -> None:
        """Raise where `take` would.

        Raises:
            OffloadError: So many bytes more would exceed the limit.
        """
        with self._lock:
            self._wanted(num_bytes)

    def take(self, num_bytes: int) -> None:
        """Count bytes that are about to be held.

        Raises:
            OffloadError: They would exceed the limit; nothing is counted then.
        """
        with self._lock:
            wanted = self._wanted(num_bytes)
            self._held = wanted
            self._peak = max(self._peak, wanted)

    def give(self, num_bytes: int) -> None:
        """Count bytes that are held no more."""
        with self._lock:
            self._held -= num_bytes

    def _wanted(self, num_bytes: int) -> int:
        wanted = self._held + num_bytes
        if self.limit_bytes is not None and wanted > self.limit_bytes:
            raise OffloadError(
                f"{self.place} would hold {wanted:,} bytes of model states, and its limit is "
                f"{self.limit_bytes:,}; offload more, share them over more ranks, or raise it"
            )
        return wanted
