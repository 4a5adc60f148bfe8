"""Sequences that a model is measured with, read by one rank and sent to all others."""

# Shapes: N sequences, S sequence.

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import attrs
import numpy as np
import torch

from trainwright.collectives import Communicator, broadcast_object
from trainwright.integration.config import RunConfig
from trainwright.integration.data import (
    DataChoice,
    Rows,
    Sequence,
    Sequences,
    Tokens,
    open_data,
    prepare_data,
    spread,
)
from trainwright.integration.data.choice import format_of
from trainwright.integration.data.finding import unused_in
from trainwright.integration.data.learned import FILE, LearnedTokenizer
from trainwright.integration.data.preparation import READING_S
from trainwright.integration.data.tokenizer import Tokenizer
from trainwright.integration.errors import DataError, TrainwrightError
from trainwright.integration.run_folder import DATA

SLICE = 1024
"""Sequences that a rank has in memory at once."""


@attrs.frozen(eq=False)
class Chosen:
    """Some of the sequences of several data sets, in turn.

    Args:
        sets: the data sets.
        indices: the numbers of those that are taken, counted through all sets.
    """

    sets: tuple[Sequences, ...]
    indices: range | np.ndarray

    @property
    def num_sequences(self) -> int:
        """How many are taken."""
        return len(self.indices)

    def sequence(self, index: int) -> Sequence:
        """Return one of them."""
        place = int(self.indices[index])
        for each in self.sets:
            if place < each.num_sequences:
                return each.sequence(place)
            place -= each.num_sequences
        raise IndexError(index)

    def slices(self) -> Iterator[Rows]:
        """Go through all of them, a slice at a time."""
        for start in range(0, self.num_sequences, SLICE):
            part = attrs.evolve(self, indices=self.indices[start : start + SLICE])
            yield spread(part, part.num_sequences)

    @classmethod
    def of(cls, sets: tuple[Sequences, ...], count: int | None) -> Chosen:
        """Take all, or so many that lie evenly between the first and the last."""
        total = sum(each.num_sequences for each in sets)
        if count is None or count >= total:
            return cls(sets, range(total))
        return cls(sets, np.linspace(0, total - 1, count).astype(np.int64))


def held_out_of(run: Path, config: RunConfig, count: int | None) -> Chosen:
    """Return what a run holds out, of the data that it was trained on.

    Args:
        run: its folder.
        config: the settings with which it is looked at.
        count: sequences to take; None for all.

    Raises:
        DataError: the run has no prepared data, or holds out less than a sequence.
    """
    found = open_data(run / DATA)
    if not found.held_out:
        raise DataError(f"the run in {run} holds nothing out; give --data PATH")
    return _chosen(found.held_out, found.packing, config, count)


def all_of(
    data: str, tokenizer: Tokenizer, config: RunConfig, count: int | None, held: ExitStack
) -> Chosen:
    """Return what files hold, in the tokens of a model.

    Args:
        data: a file or a folder, or several with weights, which do not matter.
        tokenizer: of the model.
        config: the settings; what they say of the kind of data holds for this, too.
        count: sequences to take; None for all.
        held: keeps the tokens until it is left.

    Raises:
        DataError: data is missing, too short, or has other tokens.
    """
    folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="trainwright-")))
    spec, end_token = _spec(tokenizer, folder)
    choice = attrs.evolve(
        config.data.choice,
        data=data,
        held_out=None,
        held_out_share=0.0,
        tokenizer=spec,
        end_token=end_token,
    )
    choice = _with_what_has_effect(choice)
    found = prepare_data(choice, folder / "data")
    return _chosen(found.train, found.packing, config, count)


def _with_what_has_effect(choice: DataChoice) -> DataChoice:
    """Return a run's choice for other data, without what was said of fields and files it lacks."""
    kinds = {format_of(path.place, choice.format) for path in choice.paths}
    unused = unused_in(choice, kinds)
    usual = DataChoice()
    return attrs.evolve(choice, **{name: getattr(usual, name) for name in unused})


def _chosen(
    parts: tuple[Tokens, ...], packing: str, config: RunConfig, count: int | None
) -> Chosen:
    length = config.batch.sequence_length
    return Chosen.of(tuple(part.rows(length, packing, tail=True) for part in parts), count)


def _spec(tokenizer: Tokenizer, folder: Path) -> tuple[str, str | None]:
    """Return the options that name a tokenizer and its end, written down where it is learned."""
    if not isinstance(tokenizer, LearnedTokenizer):
        return tokenizer.describe(), None
    path = folder / FILE
    path.write_text(tokenizer.content, encoding="utf-8")
    return str(path), tokenizer.end_name


def shared_slices(world: Communicator, mine: Iterator[Rows] | None) -> Iterator[Rows]:
    """Yield on every rank the rows that the first one has.

    Args:
        world: all ranks.
        mine: the rows of the first rank; what others give is not looked at.

    Communicates: for each slice a broadcast of 24 bytes and one of two or three int64 a token.
    """
    while True:
        rows = next(mine, None) if world.rank == 0 and mine is not None else None
        header = torch.zeros(3, dtype=torch.int64, device=world.device)
        if rows is not None:
            count, length = rows.tokens_NS.shape
            kinds = 2 + (rows.documents_NS is not None)
            header.copy_(torch.tensor([kinds, count, length]))
        world.broadcast(header, 0).wait()
        kinds, count, length = (int(size) for size in header.tolist())
        if not kinds:
            return
        packed = torch.zeros(kinds, count, length, dtype=torch.int64, device=world.device)
        if rows is not None:
            known = (rows.tokens_NS, rows.labels_NS, rows.documents_NS)
            packed.copy_(torch.stack([part for part in known if part is not None]))
        world.broadcast(packed, 0).wait()
        tokens, labels, *documents = packed.cpu()
        yield Rows(tokens, labels, documents[0] if documents else None)


def agreed(world: Communicator, error: TrainwrightError | None) -> None:
    """Raise on every rank the error that the first one has met while it read for all, if any.

    Communicates: what `broadcast_object` does; the others wait for up to `READING_S`.
    """
    found: TrainwrightError | None = broadcast_object(world, error, root=0, timeout_s=READING_S)
    if found is not None:
        raise found
