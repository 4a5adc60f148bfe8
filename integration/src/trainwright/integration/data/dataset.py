"""The data of a run as its ranks see it: mapped tokens, their tokenizer, what is held out."""

# Shapes: N sequences, S sequence.

from __future__ import annotations

from collections.abc import Sequence as Several
from fractions import Fraction
from typing import Protocol

import attrs
import numpy as np
import torch

from trainwright.integration.data.mixture import Mixture, Turns
from trainwright.integration.data.orders import Shuffled
from trainwright.integration.data.protocol import Samples
from trainwright.integration.data.reader import Rows, spread
from trainwright.integration.data.tokenizer import ByteTokenizer, Tokenizer
from trainwright.integration.data.tokens import Tokens
from trainwright.integration.errors import DataError
from trainwright.integration.values import counted


class Data(Protocol):
    """What a run trains on, and what it is measured with."""

    @property
    def checksum(self) -> str:
        """Hexadecimal digits that tell this data from other data."""
        ...

    @property
    def source(self) -> str:
        """Where it was read from, for messages."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """What its tokens mean."""
        ...

    @property
    def byte_stream(self) -> np.ndarray | None:
        """The training bytes, uint8 [n], where bytes of one source are the tokens."""
        ...

    def describe(self) -> str:
        """Return how much there is, in one line."""
        ...

    def samples(self, sequence_length: int, seed: int) -> Samples:
        """Return the samples of a run.

        Raises:
            DataError: there is less than one.
        """
        ...

    def held_out_rows(self, sequence_length: int, count: int) -> Rows:
        """Return up to ``count`` held-out sequences, the same whenever they are asked for.

        Raises:
            DataError: there is none.
        """
        ...


@attrs.frozen(eq=False)
class Dataset:
    """Data of one source, or of several by weight.

    Args:
        train: what is trained on, a source each.
        held_out: what is kept for evaluation: a part of each source, or one of its own.
        weights: of the sources.
        tokenizer: what the tokens mean.
        packing: how documents lie in sequences, see `Tokens.rows`.
        checksum: of all of it.
        source: where it was read from, for messages.
        files: number of files that were read.
        skipped: names of files that are not text, and were left out.
        held_out_weights: of what is held out; None: those of the sources.
    """

    train: tuple[Tokens, ...]
    held_out: tuple[Tokens, ...]
    weights: tuple[Fraction, ...]
    tokenizer: Tokenizer
    packing: str
    checksum: str
    source: str
    files: int
    skipped: tuple[str, ...] = ()
    held_out_weights: tuple[Fraction, ...] | None = None

    @property
    def byte_stream(self) -> np.ndarray | None:
        """The training bytes, uint8 [n], where bytes of one source are the tokens."""
        if len(self.train) > 1 or not isinstance(self.tokenizer, ByteTokenizer):
            return None
        return self.train[0].tokens

    def describe(self) -> str:
        """Return how much there is, in one line."""
        unit = "bytes" if isinstance(self.tokenizer, ByteTokenizer) else "tokens"
        train, held_out = (sum(map(len, part)) for part in (self.train, self.held_out))
        left_out = f", {len(self.skipped)} binary files left out" if self.skipped else ""
        # Files are held out whole, so that of few ones it may be far from the share asked for.
        share = held_out / max(1, train + held_out)
        return (
            f"{self.source}: {counted(self.files, 'file')}, {train:,} {unit} to train on, "
            f"{held_out:,} held out ({share:.1%}){left_out}"
        )

    def samples(self, sequence_length: int, seed: int) -> Samples:
        """Return the samples of a run: each source in an order of its own, in turn by weight."""
        rows = [tokens.rows(sequence_length, self.packing) for tokens in self.train]
        if len(rows) == 1:
            return Shuffled(rows[0], seed)
        shuffled = [Shuffled(each, seed, f"data order {k}") for k, each in enumerate(rows)]
        return Mixture(shuffled, self.weights)

    def held_out_rows(self, sequence_length: int, count: int) -> Rows:
        """Return held-out sequences, of each source as its weight says, spread over it."""
        sets = [tokens.rows(sequence_length, self.packing, tail=True) for tokens in self.held_out]
        if not sets:
            raise DataError(
                f"nothing of {self.source} is held out; give --held-out PATH, or a share of it"
            )
        if len(sets) == 1:
            return spread(sets[0], count)
        weights = self.weights if self.held_out_weights is None else self.held_out_weights
        counts = Turns.of(weights).prefix(count)
        return joined([spread(one, k) for one, k in zip(sets, counts, strict=True) if k])


def joined(parts: Several[Rows]) -> Rows:
    """Return rows of several data sets as one."""
    documents = [part.documents_NS for part in parts if part.documents_NS is not None]
    return Rows(
        tokens_NS=torch.cat([part.tokens_NS for part in parts]),
        labels_NS=torch.cat([part.labels_NS for part in parts]),
        documents_NS=torch.cat(documents) if documents else None,
    )
