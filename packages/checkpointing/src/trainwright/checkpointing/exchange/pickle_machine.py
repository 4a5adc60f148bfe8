"""The stack machine that a pickle is a program for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import attrs

from trainwright.checkpointing.errors import UntrustedError

_STOP = ord(".")


@attrs.frozen
class Maker:
    """What an admitted name that is called stands for; ``make`` is this package's own function."""

    make: Callable[..., Any]


@attrs.define(eq=False)
class Record:
    """An object of an admitted class: its name, and the state that the pickle gave it."""

    kind: str
    state: Any = None


class Machine:
    """A machine with a program; `run` may be called once."""

    def __init__(
        self,
        data: bytes,
        admitted: Mapping[str, Any],
        source: Path | str,
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.at = 0
        self.data = data
        self.admitted = admitted
        self._source = source
        self.persistent = persistent
        self.stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, table: Sequence[Callable[[Machine], Any] | None]) -> Any:
        """Return what the program leaves; ``table``: what each instruction does, by its code."""
        data = self.data
        while True:
            code = data[self.at]
            self.at += 1
            step = table[code]
            if step is None:
                if code == _STOP:
                    return self.stack.pop()
                self.refuse(f"the instruction {code:#04x}")
            step(self)

    def refuse(self, what: str) -> NoReturn:
        """Raise UntrustedError: the program asks for ``what``."""
        raise UntrustedError(
            f"{self._source} asks for {what}, which is not data that this package reads: refused"
        )

    def take(self, count: int) -> bytes:
        """Return the next bytes of the program."""
        begin, self.at = self.at, self.at + count
        if not 0 <= count <= len(self.data) - begin:
            raise ValueError(f"{count} bytes at {begin} of {len(self.data)}")
        return self.data[begin : self.at]

    def number(self, size: int) -> int:
        """Return the next bytes as a number."""
        return int.from_bytes(self.take(size), "little")

    def push(self, value: Any) -> None:
        """Put ``value`` on the stack."""
        self.stack.append(value)

    def pop(self) -> Any:
        """Take the value on top of the stack."""
        return self.stack.pop()

    def mark(self) -> None:
        """Begin a new stack on the old one."""
        self._marked.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        """Return the stack since the last mark, and go back to the one below."""
        items = self.stack
        self.stack = self._marked.pop()
        return items

    def line(self) -> str:
        """Return the program up to the end of the line."""
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()
