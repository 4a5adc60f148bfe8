"""Tags that let only messages meet that belong together.

Gloo ends the process when a message is larger than the receive it meets, and says nothing when it
is smaller. So a tag holds a hash of what is sent: messages that do not fit each other do not meet,
and the operation times out naming the ranks. A tag has 31 bits: one tells collectives from
messages, ten hold the hash, twenty the caller's tag or the collective's number and round.
"""

from __future__ import annotations

import zlib

from trainwright.collectives.calls import Call
from trainwright.collectives.protocol import Recv, Send

_HASH_BITS = 10
_TAG_BITS = 20
_COLLECTIVE = 1 << (_TAG_BITS + _HASH_BITS)
_MAX_CACHED = 4096

MAX_TAG = (1 << _TAG_BITS) - 1


class Tags:
    """The tags of one group; collectives are counted alike on all ranks."""

    def __init__(self) -> None:
        self._num_collectives = 0
        self._hashes: dict[object, int] = {}

    def of_collective(self, call: Call) -> tuple[int, int]:
        """Return the tags of the two rounds of the next collective."""
        number = self._num_collectives
        self._num_collectives = number + 1
        signature = (
            call.kind,
            call.shape,
            call.dtype,
            call.op,
            call.reduce_dtype,
            call.root,
        )
        tag = _COLLECTIVE | self._hash(signature)
        first = (2 * number) & MAX_TAG
        return tag | (first << _HASH_BITS), tag | ((first + 1) << _HASH_BITS)

    def of_message(self, message: Send | Recv) -> int:
        """Return the tag of a message of the caller."""
        signature = (tuple(message.tensor.shape), message.tensor.dtype)
        return (message.tag << _HASH_BITS) | self._hash(signature)

    def _hash(self, signature: object) -> int:
        found = self._hashes.get(signature)
        if found is None:
            if len(self._hashes) >= _MAX_CACHED:
                self._hashes.clear()
            found = zlib.crc32(repr(signature).encode()) & ((1 << _HASH_BITS) - 1)
            self._hashes[signature] = found
        return found
