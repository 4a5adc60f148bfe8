"""What Linux offers to processes that share memory, where Python has no name for it."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading

from trainwright.collectives.errors import CollectiveError

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYBODY = 0x7FFFFFFF


class NotAvailableError(CollectiveError):
    """Shared memory cannot be used here; the message says why and what to use instead."""


class Futex:
    """Sleeping on a number in shared memory until another process wakes the sleepers.

    Raises:
        NotAvailableError: this is not Linux on x86-64 or aarch64.
    """

    def __init__(self) -> None:
        machine = platform.machine()
        number = _FUTEX_NUMBERS.get(machine)
        if not sys.platform.startswith("linux") or number is None:
            raise NotAvailableError(
                "shared memory between processes needs Linux on x86-64 or aarch64, this is "
                f"{sys.platform} on {machine}; use TorchCommunicator"
            )
        self._number = number
        self._syscall = ctypes.CDLL(None).syscall
        self._syscall.argtypes = (
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint32,
            ctypes.c_void_p,
        )

    def wait(self, address: int, value: int, timeout_s: float) -> None:
        """Sleep until woken, unless the number at ``address`` is no longer ``value``."""
        seconds = int(timeout_s)
        limit = (ctypes.c_long * 2)(seconds, int((timeout_s - seconds) * 1e9))
        self._syscall(self._number, address, _FUTEX_WAIT, value, ctypes.addressof(limit))

    def wake(self, address: int) -> None:
        """Wake everybody who sleeps on the number at ``address``."""
        self._syscall(self._number, address, _FUTEX_WAKE, _EVERYBODY, None)


class Fence:
    """Keeps loads and stores before a call before those after it; one thread at a time calls it.

    A lock is given up with release and taken with acquire semantics. On x86-64 the first is a full
    barrier; on aarch64 an acquire never moves before an earlier release.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._release = lock.release
        self._acquire = lock.acquire

    def __call__(self) -> None:
        """Order memory."""
        self._release()
        self._acquire()


def orders_stores() -> bool:
    """Whether this processor shows stores to others in program order, and loads likewise."""
    return platform.machine() == "x86_64"


def host_identity() -> str:
    """Return what is alike for exactly those processes that can open each other's memory."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} user {os.geteuid()}"
