"""Notices when code that should only read data runs, imports, opens or removes something."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

_FORBIDDEN = frozenset(
    {
        "code.__new__",
        "compile",
        "ctypes.dlopen",
        "exec",
        "ftplib.connect",
        "import",
        "marshal.loads",
        "open",
        "os.exec",
        "os.fork",
        "os.mkdir",
        "os.posix_spawn",
        "os.putenv",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.spawn",
        "os.symlink",
        "os.system",
        "pickle.find_class",
        "shutil.rmtree",
        "socket.__new__",
        "subprocess.Popen",
        "urllib.Request",
    }
)


class RanSomethingError(BaseException):
    """What should only read has done something else; no reader that catches Exception hides it."""


class _Hook:
    """The one hook of the process: Python cannot remove it again, so it mostly sleeps."""

    is_armed = False
    is_there = False

    @classmethod
    def hear(cls, event: str, arguments: tuple[object, ...]) -> None:
        if cls.is_armed and event in _FORBIDDEN:
            cls.is_armed = False  # what shows the error may open files
            raise RanSomethingError(f"{event} {arguments!r:.200}")


@contextlib.contextmanager
def running_nothing() -> Iterator[None]:
    """Raise `RanSomethingError` where the body runs or opens something, as Python's audits tell."""
    if not _Hook.is_there:
        sys.addaudithook(_Hook.hear)
        _Hook.is_there = True
    _Hook.is_armed = True
    try:
        yield
    finally:
        _Hook.is_armed = False
