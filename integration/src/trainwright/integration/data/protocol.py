"""What the reader asks of data: sequences by number, and samples without end."""

# Shapes: S sequence.

from __future__ import annotations

from typing import Protocol

import attrs
import numpy as np


@attrs.frozen(eq=False)
class Sequence:
    """One row of training data: S inputs, and the token after the last of them.

    Args:
        tokens: integers [S + 1].
        documents: integers [S + 1], which document each token is of; negative: padding. None: all
            are of one.
        counts: bool [S + 1], false where a token is never a target. None: all are.
    """

    tokens: np.ndarray
    documents: np.ndarray | None = None
    counts: np.ndarray | None = None


class Sequences(Protocol):
    """Finitely many rows of one length; any of them is had without the others.

    Laws: ``sequence(i)`` is the same whenever and by whichever thread it is asked for; every row
    has as many tokens; all rows have documents, or none has.
    """

    @property
    def num_sequences(self) -> int:
        """How many there are."""
        ...

    def sequence(self, index: int) -> Sequence:
        """Return row ``index``, 0 to ``num_sequences - 1``."""
        ...


class Samples(Protocol):
    """The samples of a run, in its order and without end.

    Laws: as of `Sequences`; ``sample(position)`` depends on nothing but the position, so that the
    position is the whole state of who reads, in any layout.
    """

    def sample(self, position: int) -> Sequence:
        """Return the sample at a position of the run's order, from 0 on."""
        ...
