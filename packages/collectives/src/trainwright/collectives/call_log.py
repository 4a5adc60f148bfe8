"""What a rank knows of how far it and its peers have come, for the moment when they do not come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from trainwright.collectives.calls import Call, Kind

# How many finished collectives are searched for a sign of a peer.
_NUM_KEPT = 256

_FROM_ROOT = (Kind.BROADCAST, Kind.SCATTER)
_TO_ROOT = (Kind.REDUCE, Kind.GATHER)

# Number, kind and root of a collective.
_Entry = tuple[int, Kind, int | None]


class CallLog:
    """How many collectives of a group this rank has started and finished, and whom it has heard.

    Args:
        rank: this rank in the group.
    """

    __slots__ = ("_entries", "_num_finished", "_num_started", "_rank")

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_started = 0
        self._num_finished = 0
        self._entries: deque[_Entry] = deque(maxlen=_NUM_KEPT)

    def start(self, call: Call) -> None:
        """Number a collective."""
        call.number = self._num_started
        self._num_started += 1

    def finish(self, call: Call) -> None:
        """Keep that all messages of a collective have come."""
        number = call.number
        assert number is not None
        self._num_finished = max(self._num_finished, number + 1)
        tensor = call.output if call.input is None else call.input
        # Without elements, and perhaps without rows, nothing comes from a peer.
        if call.kind is not Kind.ALL_TO_ALL and (tensor is None or tensor.numel()):
            self._entries.append((number, call.kind, call.root))

    def last_heard(self, peer: int) -> int | None:
        """Return the last collective in which a message of a peer has come, as far as known."""
        heard = [
            number
            for number, kind, root in self._entries
            if (kind not in _FROM_ROOT or peer == root)
            and (kind not in _TO_ROOT or self._rank == root)
        ]
        return max(heard, default=None)

    def tell(self, peers: Sequence[int], names: Sequence[int]) -> str:
        """Say how far this rank has come, and how far some peers at least.

        Args:
            peers: their ranks in the group.
            names: what all ranks of the group are called.
        """
        parts = [
            f"rank {names[self._rank]} has started {self._num_started} collectives of this group "
            f"and finished {self._num_finished}"
        ]
        for peer in peers:
            number = self.last_heard(peer)
            heard = "in none" if number is None else f"in collective {number}"
            parts.append(f"rank {names[peer]} was last heard {heard}")
        return ", ".join(parts)
