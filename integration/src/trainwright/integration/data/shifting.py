"""Labels: the following token, shifted once in whole rows, before anything is cut."""

# Shapes: S sequence.

from __future__ import annotations

import numpy as np

from trainwright.integration.data.protocol import Sequence

IGNORE = -100
"""Label of a position that does not count."""


def labels_of(row: Sequence) -> np.ndarray:
    """Return the label of each input, int64 [S]: the token that follows it.

    `IGNORE` where what follows is padding, belongs to another document or is no target. Neither
    asks what the token is: an end token that also fills rows up is a target where it ends a text.
    """
    labels: np.ndarray = row.tokens[1:].astype(np.int64)
    if row.documents is not None:
        before, after = row.documents[:-1], row.documents[1:]
        labels[(after < 0) | (after != before)] = IGNORE
    if row.counts is not None:
        labels[~row.counts[1:]] = IGNORE
    return labels


def ordinals_of(documents: np.ndarray) -> np.ndarray:
    """Return each position counted from the start of its document's run, int64; padding has 0.

    Args:
        documents: integers [S].
    """
    places = np.arange(len(documents))
    starts = np.concatenate(([True], documents[1:] != documents[:-1]))
    ordinals: np.ndarray = places - np.maximum.accumulate(np.where(starts, places, 0))
    ordinals[documents < 0] = 0
    return ordinals
