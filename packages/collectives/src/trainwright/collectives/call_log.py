"""What a rank knows of how far it and its peers have come, for the moment when they do not come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from trainwright.collectives.calls import Call, Kind
from trainwright.collectives.protocol import ReduceOp

# How many finished collectives are searched for a sign of a peer.
_NUM_KEPT = 256

_FROM_ROOT = (Kind.BROADCAST, Kind.SCATTER)
_TO_ROOT = (Kind.REDUCE, Kind.GATHER)

# Of a collective its number, whether peers were heard in it, and all that is alike on every rank.
_Entry = tuple[
    int,
    bool,
    Kind,
    tuple[int, ...],
    torch.dtype | None,
    ReduceOp | None,
    torch.dtype | None,
    int | None,
]


class CallLog:
    """How many collectives of a group this rank has started and finished, and whom it has heard.

    Args:
        rank: this rank in the group.
    """

    __slots__ = ("_entries", "_num_finished", "_rank", "num_started")

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.num_started = 0
        self._num_finished = 0
        self._entries: deque[_Entry] = deque(maxlen=_NUM_KEPT)

    def start(self, call: Call) -> None:
        """Number a collective."""
        call.number = self.num_started
        self.num_started += 1

    def finish(self, call: Call) -> None:
        """Keep that all messages of a collective have come."""
        number = call.number
        assert number is not None
        self._num_finished = max(self._num_finished, number + 1)
        tensor = call.output if call.input is None else call.input
        # Without elements, and perhaps without rows, nothing comes from a peer.
        kind = call.kind
        is_heard = kind is not Kind.ALL_TO_ALL and (tensor is None or tensor.numel() > 0)
        shape, dtype, op = call.shape, call.dtype, call.op
        entry = (number, is_heard, kind, shape, dtype, op, call.reduce_dtype, call.root)
        self._entries.append(entry)

    def recall(self, number: int) -> str | None:
        """Describe one of the last collectives that this rank has finished; None for others."""
        for entry in list(self._entries):
            if entry[0] == number:
                _, _, kind, shape, dtype, op, reduce_dtype, root = entry
                return Call(kind, None, None, shape, dtype, op, reduce_dtype, root).describe()
        return None

    def last_heard(self, peer: int) -> int | None:
        """Return the last collective in which a message of a peer has come, as far as known."""
        heard = [
            number
            for number, is_heard, kind, *_, root in list(self._entries)
            if is_heard
            and (kind not in _FROM_ROOT or peer == root)
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
            f"rank {names[self._rank]} has started {self.num_started} collectives of this group "
            f"and finished {self._num_finished}"
        ]
        for peer in peers:
            number = self.last_heard(peer)
            heard = "in none" if number is None else f"in collective {number}"
            parts.append(f"rank {names[peer]} was last heard {heard}")
        return ", ".join(parts)
