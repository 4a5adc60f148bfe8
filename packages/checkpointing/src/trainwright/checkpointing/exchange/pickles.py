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
from typing import Any

from trainwright.checkpointing.errors import DamagedCheckpointError

from .pickle_machine import Machine, Maker, Record
from .pickle_steps import TABLE

__all__ = ["Maker", "Record", "read_pickle", "record_of"]


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
    machine = Machine(data, admitted, source, persistent)
    try:
        return machine.run(TABLE)
    except (
        LookupError,
        TypeError,
        AttributeError,  # of makers that are given other things than they expect
        ValueError,
        struct.error,
        OverflowError,
    ) as error:
        raise DamagedCheckpointError(
            f"{source} is damaged: byte {machine.at} of its pickle: {error!r:.200}"
        ) from error
