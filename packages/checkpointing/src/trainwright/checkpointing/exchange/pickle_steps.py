"""What each instruction of a pickle does, of those that make data."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from trainwright.checkpointing.errors import UntrustedError

from .pickle_machine import Machine, Maker, Record
from .showing import show

_MAX_INT_BYTES = 64
_KEYS = (str, int, float, bytes, bool, type(None))


# The next ones are nine of ten instructions of a large file: no calls that can be spared.


def _short_text(machine: Machine) -> None:
    begin = machine.at + 1
    end = begin + machine.data[machine.at]
    if end > len(machine.data):
        raise ValueError("a text that is cut short")
    machine.at = end
    machine.stack.append(machine.data[begin:end].decode("utf-8", "surrogatepass"))


def _int(machine: Machine, size: int) -> int:
    begin, machine.at = machine.at, machine.at + size
    return int.from_bytes(machine.data[begin : machine.at], "little")  # cut short: no STOP follows


def _byte(machine: Machine) -> None:
    machine.stack.append(machine.data[machine.at])
    machine.at += 1


def _memoize(machine: Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _put(machine: Machine, size: int) -> None:
    machine.memo[_int(machine, size)] = machine.stack[-1]


def _get_near(machine: Machine) -> None:
    machine.stack.append(machine.memo[machine.data[machine.at]])
    machine.at += 1


def _get(machine: Machine, size: int) -> None:
    machine.stack.append(machine.memo[_int(machine, size)])


def _text(machine: Machine, size: int) -> None:
    machine.push(machine.take(machine.number(size)).decode("utf-8", "surrogatepass"))


def _long(machine: Machine, size: int) -> None:
    count = machine.number(size)
    if count > _MAX_INT_BYTES:
        machine.refuse(f"an integer of {count} bytes")
    machine.push(int.from_bytes(machine.take(count), "little", signed=True))


def _append(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not list:
        raise TypeError("items for what is no list")
    target.extend(items)


def _set_items(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not dict or len(items) % 2:
        raise TypeError("items for what is no dictionary")
    keys = items[::2]
    _check_keys(machine, keys)
    target.update(zip(keys, items[1::2], strict=True))


def _add(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not set:
        raise TypeError("items for what is no set")
    _check_keys(machine, items)
    target.update(items)


def _check_keys(machine: Machine, keys: list[Any]) -> None:
    # The hash of a tuple is that of all in it: a nest of them takes for ever.
    for key in keys:
        if type(key) is not str and not isinstance(key, (*_KEYS, Record)):
            machine.refuse(f"a key of type {type(key).__name__}")


def _find(machine: Machine, module: Any, name: Any) -> None:
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a name that is no text")
    full = f"{module} {name}"
    if full not in machine.admitted:
        machine.refuse(f"the name {show(full.replace(' ', '.'))}")
    machine.push(machine.admitted[full])


def _call(machine: Machine) -> None:
    arguments = machine.pop()
    maker = machine.pop()
    if type(maker) is not Maker or type(arguments) is not tuple:
        machine.refuse(f"a call of a {type(maker).__name__}")
    try:
        made = maker.make(*arguments)
    except UntrustedError as error:  # a maker knows what it refuses, not where it was asked
        machine.refuse(str(error))
    machine.push(made)


def _build(machine: Machine) -> None:
    state = machine.pop()
    target = machine.stack[-1]
    if type(target) is not Record:
        # Hooks and attributes of containers: an OrderedDict has an empty state at most.
        machine.refuse(f"to change a {type(target).__name__}")
    target.state = state


def _persist(machine: Machine) -> None:
    if machine.persistent is None:
        machine.refuse("a persistent id")
    machine.push(machine.persistent(machine.pop()))


def _top(machine: Machine, count: int) -> None:
    if len(machine.stack) < count:
        raise IndexError("an empty stack")
    items = tuple(machine.stack[len(machine.stack) - count :])
    del machine.stack[len(machine.stack) - count :]
    machine.push(items)


def _float(machine: Machine) -> None:
    machine.push(struct.unpack(">d", machine.take(8))[0])


def _int32(machine: Machine) -> None:
    machine.push(int.from_bytes(machine.take(4), "little", signed=True))


def _stack_global(machine: Machine) -> None:
    name = machine.pop()
    _find(machine, machine.pop(), name)


def _protocol(machine: Machine) -> None:
    found = machine.number(1)
    if not 2 <= found <= 5:
        machine.refuse(f"pickle protocol {found}")


_STEPS: Mapping[int, Callable[[Machine], Any]] = {
    0x80: _protocol,
    0x95: lambda m: m.take(8),  # FRAME: how much to read ahead; all of it has been read
    ord("("): Machine.mark,
    ord("0"): Machine.pop,
    ord("1"): Machine.since_mark,
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): _int32,
    ord("K"): _byte,
    ord("M"): lambda m: m.stack.append(_int(m, 2)),
    0x8A: lambda m: _long(m, 1),
    0x8B: lambda m: _long(m, 4),
    ord("G"): _float,
    ord("X"): lambda m: _text(m, 4),
    0x8C: _short_text,
    0x8D: lambda m: _text(m, 8),
    ord("B"): lambda m: m.push(m.take(m.number(4))),
    ord("C"): lambda m: m.push(m.take(m.number(1))),
    0x8E: lambda m: m.push(m.take(m.number(8))),
    ord("]"): lambda m: m.push([]),
    ord("}"): lambda m: m.stack.append({}),
    ord(")"): lambda m: m.stack.append(()),
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
    ord("q"): lambda m: _put(m, 1),
    ord("r"): lambda m: _put(m, 4),
    0x94: _memoize,
    ord("h"): _get_near,
    ord("j"): lambda m: _get(m, 4),
}
TABLE = tuple(_STEPS.get(code) for code in range(256))
