"""How a group over Gloo ends with its process.

A thread that waits inside Gloo while the interpreter ends would take the process down with it: it
comes back to an interpreter that is gone, and C++ does not survive that.
"""

from __future__ import annotations

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
    size: int,
    works: Iterable[GlooWork],
    background: Background,
    watchers: Mapping[tuple[int, ...], Background],
) -> None:
    """End the threads that wait for messages, and drop the connections of the group.

    Args:
        group: the connections, none or one.
        rank: this rank in the group.
        size: how many ranks the group has.
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
        wake(group[0], rank, size)
        for thread in waiting:
            thread.has_ended(_GRACE_S)
    group.clear()


def wake(link: Link, rank: int, size: int) -> None:
    """Make all waiting for messages of this group fail, which Gloo does when one is late.

    A message of a peer that has closed its connection is never late but lost: it wakes only those
    who wait for that peer, so the next one is asked.
    """
    for peer in range(size):
        if peer != rank and _is_late(link, peer):
            return


def _is_late(link: Link, peer: int) -> bool:
    try:
        message = link.recv([torch.empty(1, dtype=torch.uint8)], peer, _NOBODYS_TAG)
        message.wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        return "imed out" in str(error)
    return False
