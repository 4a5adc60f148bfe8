"""The command ``trainwright evaluate``: the loss of a model on text that it has not seen."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from trainwright.collectives import Communicator
from trainwright.integration.config import RunConfig
from trainwright.integration.data import Rows
from trainwright.integration.data.tokenizer import Tokenizer
from trainwright.integration.errors import ConfigError, DataError, TrainwrightError
from trainwright.integration.evaluation import TokenLosses, bits_a_byte, bytes_of, token_losses
from trainwright.integration.loading import assemble_model
from trainwright.integration.looking import add_place, settings_for
from trainwright.integration.measured_rows import agreed, all_of, held_out_of, shared_slices
from trainwright.integration.places import Place, RunPlace, open_place
from trainwright.integration.starting import run_on_ranks
from trainwright.integration.strict_json import strict_json


@attrs.frozen
class Request:
    """What is asked for, as plain data that travels to other processes.

    Args:
        place: folder of the model.
        leaves: of the settings.
        data: what is read, all of it; None for what the run holds out.
        sequences: so many of them, evenly spread; None for all.
        step: of the checkpoint; None for the newest.
        as_json: whether the result is printed as JSON.
    """

    place: str
    leaves: dict[str, Any]
    data: str | None = None
    sequences: int | None = None
    step: int | None = None
    as_json: bool = False

    def run(self, world: Communicator) -> None:
        """Evaluate on this rank; the first one prints."""
        place = open_place(Path(self.place))
        config = RunConfig.from_mapping(self.leaves)
        parts = assemble_model(config, world, place.shape())
        loaded = place.load(parts, self.step)
        counts = _Counts(place.tokenizer())
        losses = TokenLosses()
        with ExitStack() as held:
            for rows in shared_slices(world, self._rows(world, config, place, held)):
                losses += token_losses(parts, rows.tokens_NS, rows.labels_NS, rows.documents_NS)
                counts.add(rows)
        if not losses.tokens:
            raise DataError("none of the sequences has a token that counts")
        if world.rank == 0:
            sys.stdout.write(counts.report(losses, loaded, as_json=self.as_json))

    def _rows(
        self, world: Communicator, config: RunConfig, place: Place, held: ExitStack
    ) -> Iterator[Rows] | None:
        """Return the rows on the first rank, which reads for all."""
        problem, rows = None, None
        try:
            if world.rank == 0:
                count = self.sequences
                if self.data is None:
                    rows = held_out_of(place.path, config, count).slices()
                else:
                    rows = all_of(self.data, place.tokenizer(), config, count, held).slices()
        except TrainwrightError as error:
            problem = error
        agreed(world, problem)
        return rows


class _Counts:
    """What has been evaluated: sequences, and the bytes of their tokens where they are known."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._sequences = 0
        self._bytes = 0

    def add(self, rows: Rows) -> None:
        self._sequences += len(rows.labels_NS)
        self._bytes += bytes_of(rows.labels_NS, self._tokenizer) or 0

    def report(self, losses: TokenLosses, loaded: str, *, as_json: bool) -> str:
        bits = bits_a_byte(losses, self._bytes)
        try:
            perplexity = math.exp(losses.mean)
        except OverflowError:
            perplexity = math.inf
        if as_json:
            values = {
                "loss": losses.mean,
                "perplexity": perplexity,
                "bits_a_byte": bits,
                "tokens": losses.tokens,
                "sequences": self._sequences,
                "model": loaded,
            }
            return strict_json(values) + "\n"
        by_byte = "" if bits is None else f", {bits:.4f} bits a byte"
        return (
            f"loss {losses.mean:.4f} nats a token, perplexity {perplexity:.2f}{by_byte}\n"
            f"{losses.tokens:,} tokens in {self._sequences:,} sequences; {loaded}\n"
        )


def add_parser(commands: Any) -> None:
    """Add the command to the tool's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "evaluate",
        help="measure a model on text that it has not seen",
        description="Print loss, perplexity and bits a byte. Of a run without --data, on what it "
        "holds out.",
        allow_abbrev=False,
    )
    add_place(parser)
    add = parser.add_argument
    add("--data", help="a file or folder, all of which is read (default: what the run holds out)")
    add("--sequences", type=int, help="read so many only, evenly spread (default: all)")
    add("--sequence-length", type=int, help="tokens a sequence (default: that of the run)")
    add("--micro-batch", type=int, help="sequences at once (default 8)")
    add("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Evaluate on as many ranks as the layout has.

    Raises:
        ConfigError: there is no model, or options contradict it.
        DataError: there is nothing to read.
    """
    place = open_place(Path(options.model))
    if options.sequences is not None and options.sequences < 1:
        raise ConfigError(f"--sequences must be at least 1, got {options.sequences}")
    if options.data is None and not isinstance(place, RunPlace):
        raise ConfigError(f"{place.path} is no run, which holds text out: give --data PATH")
    request = Request(
        place=str(place.path),
        leaves=settings_for(place, options).leaves(),
        data=options.data,
        sequences=options.sequences,
        step=options.step,
        as_json=options.json,
    )
    return run_on_ranks(request, options.comm)
