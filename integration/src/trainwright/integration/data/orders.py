"""The order of samples: each epoch a permutation that depends on seed and epoch alone."""

from __future__ import annotations

import hashlib

import numpy as np

from trainwright.collectives import random
from trainwright.integration.data.protocol import Sequence, Sequences

TABLE = 1 << 22
"""Up to so many sequences an epoch's order is a table; more are permuted one by one."""

ROUNDS = 6


class Shuffled:
    """The sequences of a data set, epoch after epoch, each epoch in an order of its own.

    Args:
        sequences: what is read.
        seed: seed of the order.
        name: tells this order from others of the seed.
    """

    def __init__(self, sequences: Sequences, seed: int, name: str = "data order") -> None:
        self.sequences = sequences
        self.seed = seed
        self.name = name
        self._tables: dict[int, np.ndarray] = {}

    def sample(self, position: int) -> Sequence:
        """Return the sample at a position of the run's order."""
        return self.sequences.sequence(self.place(position))

    def place(self, position: int) -> int:
        """Return which sequence the sample at a position is."""
        epoch, index = divmod(position, self.sequences.num_sequences)
        key = random.Key(self.seed, self.name, epoch)
        if self.sequences.num_sequences > TABLE:
            return permuted(key, self.sequences.num_sequences, index)
        table = self._tables.get(epoch)
        if table is None:
            table = random.permutation(key, self.sequences.num_sequences).numpy()
            # Threads that read ahead may each make it, all the same; where an epoch ends some are
            # in the next one already, so that two are kept.
            latest = list(self._tables.items())[-1:]
            self._tables = {**dict(latest), epoch: table}
        return int(table[index])


def permuted(key: random.Key, n: int, index: int) -> int:
    """Return element ``index`` of a permutation of 0 to n - 1, without the others.

    A Feistel network permutes the numbers of an even count of bits; what falls outside of n is
    permuted again until it falls inside, after at most four times on average.

    Source:
        Black, Rogaway: Ciphers with arbitrary finite domains (CT-RSA 2002), section 4.
    """
    half = max(1, -(-(n - 1).bit_length() // 2))
    secret = b"".join(word.to_bytes(4, "little") for word in key.words)
    secret += key.step.to_bytes(8, "little")
    while True:
        index = _feistel(secret, half, index)
        if index < n:
            return index


def _feistel(secret: bytes, half: int, number: int) -> int:
    mask = (1 << half) - 1
    left, right = number >> half, number & mask
    for step in range(ROUNDS):
        left, right = right, left ^ (_mixed(secret, step, right) & mask)
    return left << half | right


def _mixed(secret: bytes, step: int, value: int) -> int:
    text = step.to_bytes(1, "little") + value.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=secret).digest(), "little")
