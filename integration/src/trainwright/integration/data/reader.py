"""A resumable reader whose order depends on the seed and the position, never on the layout."""

# Shapes: M microbatches, B sequences a microbatch, S sequence.

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import numpy as np
import torch

from trainwright.integration.data.protocol import Samples, Sequence, Sequences
from trainwright.integration.data.shifting import IGNORE, labels_of, ordinals_of
from trainwright.integration.errors import ConfigError
from trainwright.stability_guards import Positions


@attrs.frozen(eq=False)
class Batch:
    """One data rank's part of a global batch.

    Args:
        tokens_MBS: int64, the inputs of each microbatch.
        labels_MBS: int64, the following token, shifted here once and for all.
        positions: those of all samples of the global batch in the run's sample order.
        end: position at which reading goes on after it.
        documents_MBS: int64, always on the CPU and of whole sequences: which document each input is
            of, negative for padding. None: every sequence is one document.
        ordinals_MBS: int64, the place of each input in its document; None without documents.
    """

    tokens_MBS: torch.Tensor
    labels_MBS: torch.Tensor
    positions: Positions
    end: int
    documents_MBS: torch.Tensor | None = None
    ordinals_MBS: torch.Tensor | None = None

    @property
    def valid_tokens(self) -> int:
        """Number of labels of this part that count in the loss."""
        return int((self.labels_MBS != IGNORE).sum())


@attrs.frozen
class Draw:
    """The samples of one global batch.

    Args:
        positions: theirs in the run's sample order.
        end: position at which reading goes on after them.
        microbatches: microbatches a data rank makes of its share.
    """

    positions: Positions
    end: int
    microbatches: int


class Reader:
    """Yields this data rank's share of each global batch of samples.

    Sample ``k`` of the run is the same in every layout, and the position, the number of samples
    read or left out, is the whole state: it holds on any number of data ranks, and whatever sizes
    the batches had and have.

    Args:
        samples: in the run's order.
        global_batch: sequences a step over all data ranks.
        microbatches: microbatches a data rank makes of its share.
        data_rank: this rank's place among the data ranks.
        data_size: number of data ranks.
        device: where batches are put.

    Raises:
        ConfigError: the global batch cannot be shared out evenly.
    """

    def __init__(
        self,
        samples: Samples,
        global_batch: int,
        *,
        microbatches: int = 1,
        data_rank: int = 0,
        data_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        check_batch(global_batch, data_size, microbatches)
        self.samples = samples
        self.global_batch = global_batch
        self.microbatches = microbatches
        self.data_rank = data_rank
        self.data_size = data_size
        self.device = torch.device(device)
        self.consumed = 0
        self.left_out = Positions()

    def next_batch(self, global_batch: int | None = None, microbatches: int | None = None) -> Batch:
        """Return this rank's part of the next global batch and move the position past it.

        Args:
            global_batch: its sequences over all data ranks; None for as many as ever.
            microbatches: microbatches of this rank's share; None for as many as ever.

        Raises:
            ConfigError: they cannot be shared out evenly.
        """
        return self.read(self.draw(global_batch, microbatches))

    def draw(self, global_batch: int | None = None, microbatches: int | None = None) -> Draw:
        """Say which samples the next global batch has and move past them, without reading any."""
        size = self.global_batch if global_batch is None else global_batch
        parts = self.microbatches if microbatches is None else microbatches
        check_batch(size, self.data_size, parts)
        positions, self.consumed = self.left_out.draw(self.consumed, size)
        return Draw(positions, self.consumed, parts)

    def read(self, draw: Draw) -> Batch:
        """Return this rank's part of a batch; threads may read several at once."""
        share = draw.positions.count // self.data_size
        mine = _part(draw.positions, self.data_rank * share, share)
        rows = [self.samples.sample(position) for position in mine]
        documents = ordinals = None
        if rows[0].documents is not None:
            documents = np.stack([_documents(row)[:-1] for row in rows]).astype(np.int64)
            ordinals = np.stack([ordinals_of(row) for row in documents])
        return Batch(
            tokens_MBS=self._put(np.stack([row.tokens[:-1] for row in rows]), draw),
            labels_MBS=self._put(np.stack([labels_of(row) for row in rows]), draw),
            positions=draw.positions,
            end=draw.end,
            # Documents stay where the host reads them.
            documents_MBS=None if documents is None else _split(documents, draw.microbatches),
            ordinals_MBS=None if ordinals is None else self._put(ordinals, draw),
        )

    def state_dict(self) -> dict[str, int]:
        """Return the position as plain data; it holds for any number of data ranks."""
        return {"consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position of ``state``."""
        self.consumed = int(state["consumed"])

    def _put(self, rows: np.ndarray, draw: Draw) -> torch.Tensor:
        return _split(rows, draw.microbatches).to(self.device)


def _documents(row: Sequence) -> np.ndarray:
    assert row.documents is not None, "all rows of a data set have documents, or none has"
    return row.documents


def _split(rows: np.ndarray, microbatches: int) -> torch.Tensor:
    whole = torch.from_numpy(rows.astype(np.int64))
    return whole.view(microbatches, -1, rows.shape[1])


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


@attrs.frozen(eq=False)
class Rows:
    """Sequences to be evaluated, the same on every rank.

    Args:
        tokens_NS: int64, inputs.
        labels_NS: int64, shifted; `IGNORE` does not count.
        documents_NS: int64, which document each input is of, negative for padding. None: every
            sequence is one document.
    """

    tokens_NS: torch.Tensor
    labels_NS: torch.Tensor
    documents_NS: torch.Tensor | None = None


def spread(sequences: Sequences, count: int) -> Rows:
    """Return up to ``count`` sequences evenly spread over a data set, none of them twice."""
    available = sequences.num_sequences
    chosen = np.linspace(0, available - 1, min(count, available)).astype(np.int64)
    rows = [sequences.sequence(int(index)) for index in chosen]
    documents = None
    if rows[0].documents is not None:
        documents = _rows(_documents(row)[:-1] for row in rows)
    return Rows(
        tokens_NS=_rows(row.tokens[:-1] for row in rows),
        labels_NS=_rows(labels_of(row) for row in rows),
        documents_NS=documents,
    )


def _rows(rows: Iterable[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(list(rows)).astype(np.int64))
