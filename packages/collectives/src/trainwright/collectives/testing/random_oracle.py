"""The documented layout of random numbers once more, in plain Python, to compare with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from trainwright.collectives.random import Key

_WORD = 2**32


def philox_in_plain_python(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Return the four words of Philox-4x32-10 for one counter of four words and one key of two."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], _WORD)
        high1, low1 = divmod(0xCD9E8D57 * c[2], _WORD)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % _WORD, (k[1] + 0xBB67AE85) % _WORD]
    return c


def bits_by_the_documented_layout(key: Key, index: int, attempt: int = 0) -> int:
    """Return the 64 bits of one element, from the docstring of `random` alone."""
    text = key.seed.to_bytes(8, "little") + key.name.encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    key_words = [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]
    block, lane = divmod(index, 2)
    step_words = [key.step % _WORD, key.step // _WORD + attempt * 2**16]
    words = philox_in_plain_python([block % _WORD, block // _WORD, *step_words], key_words)
    return words[2 * lane] * _WORD + words[2 * lane + 1]
