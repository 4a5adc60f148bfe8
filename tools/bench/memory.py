"""The most memory that this process held: what it shares counted in full (RSS) or in part (PSS)."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

import attrs

_PROCESS = Path("/proc/self")
_INTERVAL_S = 0.004
_RESET_PEAK = "5"


@attrs.frozen
class Memory:
    """Bytes that a process holds, or held at most.

    Args:
        pss: with each shared page divided by the number of processes that map it, so that a sum
            over processes counts every page once.
        rss: with shared pages in full.
    """

    pss: int
    rss: int


def now() -> Memory:
    """Return what this process holds."""
    fields = _fields("smaps_rollup")
    return Memory(fields["Pss"], fields["Rss"])


class Peak:
    """Watches this process while the block runs.

    RSS is the kernel's own high-water mark; PSS has none and is sampled every few milliseconds, so
    an allocation that lives for less may be missed. Sampling slows the process down: do not take
    times meanwhile.
    """

    def __init__(self) -> None:
        self._pss = 0
        self._rss = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def memory(self) -> Memory:
        """The most that was held, after the block."""
        return Memory(self._pss, self._rss)

    def __enter__(self) -> Peak:
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self._rss = _fields("status")["VmHWM"]

    def _watch(self) -> None:
        while True:
            self._pss = max(self._pss, now().pss)
            if self._over.wait(_INTERVAL_S):
                return


def _fields(file: str) -> dict[str, int]:
    """Return the fields of a file of /proc/self that are given in kB, in bytes."""
    found = {}
    for line in (_PROCESS / file).read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found
