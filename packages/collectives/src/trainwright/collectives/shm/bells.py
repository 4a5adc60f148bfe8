"""What wakes the threads of a process that sleep: each on a number in the process's own memory."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from trainwright.collectives.shm.segment import Segment
from trainwright.collectives.shm.system import Futex

if TYPE_CHECKING:
    from trainwright.collectives.shm.domain import Domain

# The places of 64-bit numbers at the start of every segment, on cache lines of their own: what the
# threads that wait sleep on, how many of them do, and what the helper sleeps on.
BELL = 0
NUM_ASLEEP = 1
HELP_BELL = 16

_HELPER_NAP_S = 5.0
_MASK = 0xFFFFFFFF


def ring(futex: Futex, words: memoryview, base: int, place: int) -> None:
    """Wake who sleeps on a bell, and keep awake who is about to.

    Args:
        futex: the system's part.
        words: the numbers of the sleepers' segment.
        base: where that begins here.
        place: the bell.
    """
    words[place] = (words[place] + 1) & _MASK
    futex.wake(base + 8 * place)


def help_when_asked(owner: weakref.ref[Domain], futex: Futex, own: Segment) -> None:
    """Help whenever a peer asks for it, as long as the domain exists."""
    while True:
        bell = own.words[HELP_BELL]
        domain = owner()
        if domain is None:
            return
        domain.help()
        del domain
        futex.wait(own.base + 8 * HELP_BELL, bell, _HELPER_NAP_S)
