"""A resumable reader whose order depends on the seed and the position, never on the layout."""

# Shapes: M microbatches, B sequences a microbatch, S sequence.

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import torch

from trainwright.collectives import random
from trainwright.integration.errors import ConfigError, DataError
from trainwright.stability_guards import Positions

IGNORE = -100
"""Label of a position that does not count."""


@attrs.frozen(eq=False)
class Batch:
    """One data rank's part of a global batch.

    Args:
        tokens_MBS: int64, the inputs of each microbatch.
        labels_MBS: int64, the following token, shifted here once and for all.
        positions: those of all samples of the global batch in the run's sample order.
        end: position at which reading goes on after it.
    """

    tokens_MBS: torch.Tensor
    labels_MBS: torch.Tensor
    positions: Positions
    end: int

    @property
    def valid_tokens(self) -> int:
        """Number of labels of this part that count in the loss."""
        return int((self.labels_MBS != IGNORE).sum())


class Reader:
    """Cuts a byte stream into sequences and yields this data rank's share of each global batch.

    The stream is cut into non-overlapping sequences; each epoch is a permutation of them drawn from
    (seed, epoch). Sample ``k`` of the run is thus the same in every layout, and the position, the
    number of samples read or left out, is the whole state.

    Args:
        stream: uint8 [n].
        sequence_length: tokens a sequence.
        global_batch: sequences a step over all data ranks.
        microbatches: microbatches a data rank makes of its share.
        seed: seed of the order.
        data_rank: this rank's place among the data ranks.
        data_size: number of data ranks.
        device: where batches are put.

    Raises:
        DataError: the stream is shorter than one sequence and its next token.
        ConfigError: the global batch cannot be shared out evenly.
    """

    def __init__(
        self,
        stream: np.ndarray,
        sequence_length: int,
        global_batch: int,
        *,
        microbatches: int = 1,
        seed: int = 0,
        data_rank: int = 0,
        data_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_sequences = (len(stream) - 1) // sequence_length
        if self.num_sequences < 1:
            raise DataError(
                f"the data holds {len(stream)} bytes, shorter than one sequence of "
                f"sequence_length={sequence_length} and its next byte; "
                f"a sequence length up to {max(len(stream) - 1, 1)} works"
            )
        check_batch(global_batch, data_size, microbatches)
        self.stream = stream
        self.sequence_length = sequence_length
        self.global_batch = global_batch
        self.microbatches = microbatches
        self.seed = seed
        self.data_rank = data_rank
        self.data_size = data_size
        self.device = torch.device(device)
        self.consumed = 0
        self.left_out = Positions()
        self._order: tuple[int, np.ndarray] | None = None

    def next_batch(self) -> Batch:
        """Return this rank's part of the next global batch and move the position past it."""
        share = self.global_batch // self.data_size
        positions, self.consumed = self.left_out.draw(self.consumed, self.global_batch)
        mine = _part(positions, self.data_rank * share, share)
        rows = np.stack([self.sample(index) for index in mine])
        sequences = torch.from_numpy(rows.astype(np.int64)).to(self.device)
        sequences = sequences.view(self.microbatches, -1, self.sequence_length + 1)
        return Batch(
            tokens_MBS=sequences[..., :-1].contiguous(),
            labels_MBS=sequences[..., 1:].contiguous(),
            positions=positions,
            end=self.consumed,
        )

    def state_dict(self) -> dict[str, int]:
        """Return the position as plain data; it holds for any number of data ranks."""
        return {"consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position of ``state``."""
        self.consumed = int(state["consumed"])

    def sample(self, index: int) -> np.ndarray:
        """Return the sequence at a position of the run's sample order, and the byte after it.

        Returns:
            uint8 [S + 1].
        """
        epoch, place = divmod(index, self.num_sequences)
        if self._order is None or self._order[0] != epoch:
            key = random.Key(self.seed, "data order", epoch)
            self._order = (epoch, random.permutation(key, self.num_sequences).numpy())
        start = int(self._order[1][place]) * self.sequence_length
        return self.stream[start : start + self.sequence_length + 1]


def _part(positions: Positions, first: int, count: int) -> list[int]:
    """Return ``count`` of the positions, from the ``first``-th on, without listing the others."""
    found: list[int] = []
    for start, stop in positions.spans:
        begin = min(start + first, stop)
        first -= begin - start
        found.extend(range(begin, min(stop, begin + count - len(found))))
    return found


def check_batch(global_batch: int, data_size: int, microbatches: int) -> None:
    """Check that a global batch can be shared out over data ranks and microbatches.

    Raises:
        ConfigError: with the nearest batch sizes that work.
    """
    unit = data_size * microbatches
    if global_batch < 1 or global_batch % unit:
        below = global_batch // unit * unit
        nearest = f"{below} or {below + unit}" if below else f"{unit}"
        raise ConfigError(
            f"global_batch={global_batch} must be a multiple of dp={data_size} * "
            f"microbatches={microbatches} = {unit}; {nearest} works"
        )


def evenly_spaced(
    stream: np.ndarray, sequence_length: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels [n, S] of up to ``count`` sequences spread over the stream.

    Raises:
        DataError: the stream is shorter than one sequence and its next token.
    """
    available = (len(stream) - 1) // sequence_length
    if available < 1:
        raise DataError(
            f"the held-out part has {len(stream)} bytes, shorter than one sequence of "
            f"sequence_length={sequence_length}; give more text or shorter sequences"
        )
    chosen = np.linspace(0, available - 1, min(count, available)).astype(np.int64)
    places = chosen[:, None] * sequence_length + np.arange(sequence_length + 1)
    rows = torch.from_numpy(stream[places].astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
