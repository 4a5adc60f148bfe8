"""What a bucket's host holds for it, where states are kept away from the device."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

_UNITS_AT_ONCE = 3
"""Of a file: one is updated, the next one is read, the one before is written."""


@attrs.frozen
class Away:
    """What `data_parallel` keeps away from the device, as its ``offload`` says.

    Args:
        weights: A rank's part of the modules' weights too, between uses (stage 3).
        in_file: All of it in a file, with room for three units of it in host memory.
    """

    weights: bool = False
    in_file: bool = False


@attrs.frozen
class AwayBytes:
    """What is kept of one bucket away from the device.

    Args:
        kept: Bytes of masters, summed gradients, optimizer states, and maybe weights.
        counts: Bytes of step counts, which are in host memory in any case.
        in_file: Whether it is kept in a file.
        is_updated: Whether the rank updates any of it.
    """

    kept: int = 0
    counts: int = 0
    in_file: bool = False
    is_updated: bool = True


def host_bytes(buckets: Iterable[AwayBytes]) -> int:
    """Return the host memory that buckets take during an update, padding of states apart."""
    every = list(buckets)
    units = [each.kept for each in every if each.in_file and each.is_updated]
    room = min(len(units), _UNITS_AT_ONCE) * max(units, default=0)
    return room + sum(each.counts + (0 if each.in_file else each.kept) for each in every)


def file_bytes(buckets: Iterable[AwayBytes]) -> int:
    """Return the bytes of a rank's file."""
    return sum(each.kept for each in buckets if each.in_file)
