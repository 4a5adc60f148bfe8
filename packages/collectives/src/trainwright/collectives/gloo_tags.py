"""Tags that let only messages meet that belong together.

Gloo ends the process when a message is larger than the receive it meets, and says nothing when it
is smaller. So a tag holds a hash of what is sent: messages that do not fit each other do not meet.
`CallWatch` then tells which collectives differ; all else times out naming the ranks. Messages of
one tag arrive in order, which tells operations alike apart. A tag has 31 bits: the first tells
collectives from the caller's messages; then follow a collective's round and 29 bits of hash, or
the caller's tag and 10 bits of hash.
"""

from __future__ import annotations

import zlib

from trainwright.collectives.calls import Call
from trainwright.collectives.protocol import Recv, Send

_HASH_BITS = 10
_TAG_BITS = 20
_COLLECTIVE = 1 << 30
_SECOND_ROUND = 1 << 29
_MAX_CACHED = 4096
# Numbers that are near each other come to lie far apart.
_ODD_FACTOR = 2654435761

MAX_TAG = (1 << _TAG_BITS) - 1


class Tags:
    """The tags of one group."""

    def __init__(self) -> None:
        self._hashes: dict[object, int] = {}

    def of_collective(self, call: Call) -> tuple[int, int]:
        """Return the tags of the two rounds of a collective."""
        signature = (call.kind, call.shape, call.dtype, call.op, call.reduce_dtype, call.root)
        tag = _COLLECTIVE | (self._hash(signature) % _SECOND_ROUND)
        return tag, tag | _SECOND_ROUND

    def of_part(self, tag: int, numel: int) -> int:
        """Return the tag of a part of a collective; the parts of an all-to-all differ in size."""
        return tag ^ (numel * _ODD_FACTOR % _SECOND_ROUND)

    def of_message(self, message: Send | Recv) -> int:
        """Return the tag of a message of the caller."""
        signature = (message.tensor.shape, message.tensor.dtype)
        return (message.tag << _HASH_BITS) | (self._hash(signature) % (1 << _HASH_BITS))

    def _hash(self, signature: object) -> int:
        found = self._hashes.get(signature)
        if found is None:
            if len(self._hashes) >= _MAX_CACHED:
                self._hashes.clear()
            found = zlib.crc32(repr(signature).encode())
            self._hashes[signature] = found
        return found
