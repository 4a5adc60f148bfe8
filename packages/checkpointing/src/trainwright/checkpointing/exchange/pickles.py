"""Reads a pickle as data: nothing is imported and nothing of the file's choice is called.

A pickle is a program for a small stack machine. This one knows the instructions that make plain
values, and a table of names that the caller admits; whatever else a file asks for is refused by
name. Its memory is bounded by the file's size: lengths are compared with what is there before
anything is read, and memo numbers cost nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import attrs

from trainwright.checkpointing.errors import DamagedCheckpointError, UntrustedError

from .showing import show

_MAX_INT_BYTES = 64
_KEYS = (str, int, float, bytes, bool, type(None))


@attrs.frozen
class Maker:
    """What an admitted name that is called stands for; ``make`` is this package's own function."""

    make: Callable[..., Any]


@attrs.define(eq=False)
class Record:
    """An object of an admitted class: its name, and the state that the pickle gave it."""

    kind: str
    state: Any = None


def record_of(kind: str) -> Maker:
    """Return what makes records of ``kind``, whatever arguments the pickle has for it."""
    return Maker(lambda *_: Record(kind))


def read_pickle(
    data: bytes,
    admitted: Mapping[str, Any],
    source: Path | str,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the value that ``data`` describes.

    Args:
        data: The pickle, of protocol 2 to 5.
        admitted: What "module name" stands for: a `Maker`, or a value.
        source: Where the pickle is from, for messages.
        persistent: Returns what a persistent id stands for; None: there are none.

    Raises:
        UntrustedError: It asks for a name or an instruction that is not admitted.
        DamagedCheckpointError: It is no pickle.
    """
    machine = _Machine(data, admitted, source, persistent)
    try:
        return machine.run()
    except (LookupError, TypeError, ValueError, struct.error, OverflowError) as error:
        raise DamagedCheckpointError(
            f"{source} is damaged: byte {machine.at} of its pickle: {error!r:.200}"
        ) from error


class _Machine:
    """The stack machine; `run` may be called once."""

    def __init__(
        self,
        data: bytes,
        admitted: Mapping[str, Any],
        source: Path | str,
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.at = 0
        self._data = data
        self.admitted = admitted
        self._source = source
        self.persistent = persistent
        self.stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        steps = _STEPS
        data = self._data
        while True:
            code = data[self.at]
            self.at += 1
            step = steps.get(code)
            if step is None:
                if code == _STOP:
                    return self.stack.pop()
                self.refuse(f"the instruction {code:#04x}")
            step(self)

    def refuse(self, what: str) -> NoReturn:
        raise UntrustedError(
            f"{self._source} asks for {what}, which is not data that this package reads: refused"
        )

    def take(self, count: int) -> bytes:
        begin, self.at = self.at, self.at + count
        if not 0 <= count <= len(self._data) - begin:
            raise ValueError(f"{count} bytes at {begin} of {len(self._data)}")
        return self._data[begin : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def mark(self) -> None:
        self._marked.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self._marked.pop()
        return items

    def line(self) -> str:
        end = self._data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def put(self, number: int) -> None:
        self._memo[number] = self.stack[-1]

    def get(self, number: int) -> None:
        self.push(self._memo[number])

    def memo_size(self) -> int:
        return len(self._memo)


def _text(machine: _Machine, size: int) -> None:
    machine.push(machine.take(machine.number(size)).decode("utf-8", "surrogatepass"))


def _long(machine: _Machine, size: int) -> None:
    count = machine.number(size)
    if count > _MAX_INT_BYTES:
        machine.refuse(f"an integer of {count} bytes")
    machine.push(int.from_bytes(machine.take(count), "little", signed=True))


def _append(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not list:
        raise TypeError("items for what is no list")
    target.extend(items)


def _set_items(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not dict or len(items) % 2:
        raise TypeError("items for what is no dictionary")
    keys = items[::2]
    _check_keys(machine, keys)
    target.update(zip(keys, items[1::2], strict=True))


def _add(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not set:
        raise TypeError("items for what is no set")
    _check_keys(machine, items)
    target.update(items)


def _check_keys(machine: _Machine, keys: list[Any]) -> None:
    # The hash of a tuple is that of all in it: a nest of them takes for ever.
    for key in keys:
        if not isinstance(key, (*_KEYS, Record)):
            machine.refuse(f"a key of type {type(key).__name__}")


def _find(machine: _Machine, module: Any, name: Any) -> None:
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a name that is no text")
    full = f"{module} {name}"
    if full not in machine.admitted:
        machine.refuse(f"the name {show(full.replace(' ', '.'))}")
    machine.push(machine.admitted[full])


def _call(machine: _Machine) -> None:
    arguments = machine.pop()
    maker = machine.pop()
    if type(maker) is not Maker or type(arguments) is not tuple:
        machine.refuse(f"a call of a {type(maker).__name__}")
    machine.push(maker.make(*arguments))


def _build(machine: _Machine) -> None:
    state = machine.pop()
    target = machine.stack[-1]
    if type(target) is not Record:
        # Hooks and attributes of containers: an OrderedDict has an empty state at most.
        machine.refuse(f"to change a {type(target).__name__}")
    target.state = state


def _persist(machine: _Machine) -> None:
    if machine.persistent is None:
        machine.refuse("a persistent id")
    machine.push(machine.persistent(machine.pop()))


def _top(machine: _Machine, count: int) -> None:
    if len(machine.stack) < count:
        raise IndexError("an empty stack")
    items = tuple(machine.stack[len(machine.stack) - count :])
    del machine.stack[len(machine.stack) - count :]
    machine.push(items)


def _float(machine: _Machine) -> None:
    machine.push(struct.unpack(">d", machine.take(8))[0])


def _int32(machine: _Machine) -> None:
    machine.push(int.from_bytes(machine.take(4), "little", signed=True))


def _stack_global(machine: _Machine) -> None:
    name = machine.pop()
    _find(machine, machine.pop(), name)


def _protocol(machine: _Machine) -> None:
    found = machine.number(1)
    if not 2 <= found <= 5:
        machine.refuse(f"pickle protocol {found}")


_STOP = ord(".")
_STEPS: Mapping[int, Callable[[_Machine], Any]] = {
    0x80: _protocol,
    0x95: lambda m: m.take(8),  # FRAME: how much to read ahead; all of it has been read
    ord("("): _Machine.mark,
    ord("0"): _Machine.pop,
    ord("1"): _Machine.since_mark,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): _int32,
    ord("K"): lambda m: m.push(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    0x8A: lambda m: _long(m, 1),
    0x8B: lambda m: _long(m, 4),
    ord("G"): _float,
    ord("X"): lambda m: _text(m, 4),
    0x8C: lambda m: _text(m, 1),
    0x8D: lambda m: _text(m, 8),
    ord("B"): lambda m: m.push(m.take(m.number(4))),
    ord("C"): lambda m: m.push(m.take(m.number(1))),
    0x8E: lambda m: m.push(m.take(m.number(8))),
    ord("]"): lambda m: m.push([]),
    ord("}"): lambda m: m.push({}),
    ord(")"): lambda m: m.push(()),
    0x8F: lambda m: m.push(set()),
    ord("a"): lambda m: _append(m, [m.pop()]),
    ord("e"): lambda m: _append(m, m.since_mark()),
    ord("s"): lambda m: _set_items(m, [m.pop(), m.pop()][::-1]),
    ord("u"): lambda m: _set_items(m, m.since_mark()),
    0x90: lambda m: _add(m, m.since_mark()),
    ord("t"): lambda m: m.push(tuple(m.since_mark())),
    0x85: lambda m: _top(m, 1),
    0x86: lambda m: _top(m, 2),
    0x87: lambda m: _top(m, 3),
    ord("c"): lambda m: _find(m, m.line(), m.line()),
    0x93: _stack_global,
    ord("R"): _call,
    0x81: _call,  # NEWOBJ: a maker makes the same either way
    ord("b"): _build,
    ord("Q"): _persist,
    ord("q"): lambda m: m.put(m.number(1)),
    ord("r"): lambda m: m.put(m.number(4)),
    0x94: lambda m: m.put(m.memo_size()),
    ord("h"): lambda m: m.get(m.number(1)),
    ord("j"): lambda m: m.get(m.number(4)),
}
