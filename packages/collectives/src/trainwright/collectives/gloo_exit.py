"""How a group over Gloo ends with its process.

A thread that waits inside Gloo while the interpreter ends would take the process down with it: it
comes back to an interpreter that is gone, and C++ does not survive that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from datetime import timedelta

import torch

from trainwright.collectives.background import Background
from trainwright.collectives.gloo_work import GlooWork
from trainwright.collectives.rendezvous import Link

# Of all collectives and their sizes one in half a billion has messages of this tag.
_NOBODYS_TAG = (1 << 31) - 1
_IDLE_S = 0.05
_GRACE_S = 2.0


def end_threads(
    group: list[Link],
    rank: int,
    works: Iterable[GlooWork],
    background: Background,
    watchers: Mapping[tuple[int, ...], Background],
) -> None:
    """End the threads that wait for messages, and drop the connections of the group.

    Args:
        group: the connections, none or one.
        rank: this rank in the group.
        works: what the threads may wait for.
        background: the thread that sends second rounds.
        watchers: the threads that watch for messages.
    """
    threads = [background, *watchers.values()]
    for thread in threads:
        thread.stop()
    waiting = [thread for thread in threads if not thread.has_ended(_IDLE_S)]
    if waiting and group:
        for work in list(works):
            work.give_up()
        wake(group[0], rank)
        for thread in waiting:
            thread.has_ended(_GRACE_S)
    group.clear()


def wake(link: Link, rank: int) -> None:
    """Make all waiting for messages of this group fail, which Gloo does when one is late."""
    with contextlib.suppress(RuntimeError):
        late = link.recv([torch.empty(1, dtype=torch.uint8)], 1 if rank == 0 else 0, _NOBODYS_TAG)
        late.wait(timedelta(milliseconds=1))
