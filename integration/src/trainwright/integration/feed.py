"""Batches together with the number of tokens that the whole global batch divides by."""

# Shapes: M microbatches, B sequences a microbatch, S sequence.

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import attrs
import torch

from trainwright.collectives import Communicator, Work
from trainwright.integration.data import IGNORE, Batch, Reader
from trainwright.integration.data.prefetch import ReadAhead
from trainwright.integration.flops import Spans
from trainwright.integration.sequence_part import SequencePart
from trainwright.stability_guards import Positions

WORKERS = 2
"""Threads that read ahead."""


@attrs.frozen(eq=False)
class GlobalBatch:
    """This rank's part of a global batch.

    Args:
        part: tokens and labels of this rank: its sequences, of these its positions; documents are
            those of all positions.
        positions_S: int64, which positions those are.
        tokens: float64 0-d, valid labels of this part.
        divisor: float64 0-d, valid labels of the global batch, the same on every rank.
        documents: int64 [2], the tokens that are in documents and the squared lengths of these, of
            the global batch; None where every sequence is one document.
        sequence_length: inputs of a whole sequence.
    """

    part: Batch
    positions_S: torch.Tensor
    tokens: torch.Tensor
    divisor: torch.Tensor
    documents: torch.Tensor | None
    sequence_length: int

    @property
    def microbatches(self) -> int:
        """Microbatches of this rank's part."""
        return len(self.part.tokens_MBS)

    def spans(self) -> Spans:
        """Return what the FLOPs of the step follow from; the host waits if there are documents."""
        if self.documents is not None:
            tokens, squares = self.documents.tolist()
            return Spans(tokens, squares)
        length = self.sequence_length
        tokens = self.part.positions.count * length
        return Spans(tokens, tokens * length)

    def inputs(self, stage: int, microbatch: int) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of a stage for one microbatch: the same for every stage.

        Where sequences are packed with several documents, ``documents_BS`` are those of the whole
        sequences, as attention over context ranks takes them, on the CPU; ``ordinals_BS`` are the
        places in their documents of this rank's positions.
        """
        found = {
            "tokens_BS": self.part.tokens_MBS[microbatch],
            "labels_BS": self.part.labels_MBS[microbatch],
            "positions_S": self.positions_S,
        }
        if self.part.documents_MBS is not None and self.part.ordinals_MBS is not None:
            found["documents_BS"] = self.part.documents_MBS[microbatch]
            found["ordinals_BS"] = self.part.ordinals_MBS[microbatch]
        return found


class Feed:
    """Sums the valid tokens of the next step over data and context ranks, a step ahead.

    Labels are shifted in whole sequences; only then does each context rank take its positions.

    The position it reports is that of the batches handed out, not of those read ahead. It is the
    `BatchSource` that a recovery goes back with.

    Args:
        reader: yields this data rank's sequences.
        data: ranks that have parts of a global batch.
        part: which positions of each sequence this rank takes.
        ahead: batches that threads read before they are asked for; 0 reads when one is.
        sizes: sequences of the global batch that begins at a position, and the microbatches of a
            rank's share; None for those of the reader.

    Communicates: one int64 all-reduce a step over ``data``, of one element, or of three where
        sequences are packed with documents.
    """

    def __init__(
        self,
        reader: Reader,
        data: Communicator,
        part: SequencePart,
        *,
        ahead: int = 0,
        sizes: Callable[[int], tuple[int, int]] | None = None,
    ) -> None:
        self._reader = reader
        self._sizes = sizes
        self._reading = ReadAhead(self._begin, ahead, workers=WORKERS)
        self._data = data
        self._part = part
        self._positions_S = part.positions()
        self._ahead: tuple[Batch, torch.Tensor, torch.Tensor, Work] | None = None
        self._position = reader.consumed
        self._last = Positions()

    def next_batch(self) -> GlobalBatch:
        """Return the next batch and start on the one after it."""
        batch, own, count, work = self._ahead or self._start()
        work.wait()
        documents = count[1:] if len(count) > 1 else None
        self._position, self._last = batch.end, batch.positions
        self._ahead = self._start()
        return GlobalBatch(
            part=batch,
            positions_S=self._positions_S,
            tokens=own.to(torch.float64),
            divisor=count[0].to(torch.float64),
            documents=documents,
            sequence_length=self._part.layout.length,
        )

    @property
    def left_out(self) -> Positions:
        """Positions that are never read."""
        return self._reader.left_out

    @property
    def position(self) -> int:
        """Position after the last batch handed out, in the run's sample order."""
        return self._position

    @property
    def last(self) -> Positions:
        """Positions of the last batch handed out, of all data ranks."""
        return self._last

    def discard_step(self) -> None:
        """Hear that the last batch was not applied, which changes nothing here."""

    def count_from(self, updates: int) -> None:
        """Hear how many updates were applied, on which nothing here depends."""

    def seek(self, position: int, left_out: Positions) -> None:
        """Read on from ``position``, never any of ``left_out``; every rank calls it together."""
        if self._ahead is not None:
            self._ahead[-1].wait()
            self._ahead = None
        self._reading.drop()
        self._reader.left_out = left_out
        self._reader.load_state_dict({"consumed": position})
        self._position = position

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch handed out."""
        return {"consumed": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the batches that ``state`` counts; every rank calls it together."""
        self.seek(int(state["consumed"]), self._reader.left_out)

    def close(self) -> None:
        """End the threads that read ahead; nothing is read after that."""
        self._reading.close()

    def _draw(self) -> Callable[[], Batch]:
        sizes = () if self._sizes is None else self._sizes(self._reader.consumed)
        return functools.partial(self._reader.read, self._reader.draw(*sizes))

    def _begin(self) -> Callable[[], Batch]:
        return functools.partial(self._part_of, self._draw())

    def _part_of(self, read: Callable[[], Batch]) -> Batch:
        """Read a batch and take this rank's positions; any thread may."""
        whole = read()
        return attrs.evolve(
            whole,
            tokens_MBS=self._part.take(whole.tokens_MBS),
            labels_MBS=self._part.take(whole.labels_MBS),
            ordinals_MBS=None
            if whole.ordinals_MBS is None
            else self._part.take(whole.ordinals_MBS),
        )

    def _start(self) -> tuple[Batch, torch.Tensor, torch.Tensor, Work]:
        """Begin on a batch; return it, its valid labels, and those of all ranks once waited for."""
        batch = self._reading.next()
        # Counted where the labels are: the host does not wait for the device.
        own = (batch.labels_MBS != IGNORE).sum()
        count = own.reshape(1).to(self._data.device, copy=True)
        if batch.documents_MBS is not None:
            # These are of whole sequences: of the ranks that share one, the first counts them.
            mine = _spans_of(batch.documents_MBS) * (self._part.comm.rank == 0)
            count = torch.cat((count, mine.to(count.device)))
        return batch, own, count, self._data.all_reduce(count)


def _spans_of(documents_MBS: torch.Tensor) -> torch.Tensor:
    """Return the tokens that are in documents, and the squared lengths of these, int64 [2]."""
    rows_NS = documents_MBS.flatten(0, 1)
    # Documents of several rows have the same numbers.
    apart = int(rows_NS.max()) + 2
    keys_NS = rows_NS + apart * torch.arange(1, len(rows_NS) + 1)[:, None]
    keys, lengths = torch.unique_consecutive(keys_NS, return_counts=True)
    lengths = lengths[(keys + 1) % apart > 0]  # padding is document -1
    return torch.stack((lengths.sum(), lengths.square().sum()))
