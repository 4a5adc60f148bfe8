"""The command ``trainwright generate``: text that a model continues a prompt with."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import attrs

from trainwright.collectives import Communicator
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.generation import continuations
from trainwright.integration.loading import assemble_model
from trainwright.integration.looking import add_place, settings_for
from trainwright.integration.places import Place, open_place
from trainwright.integration.sampling import Sampling
from trainwright.integration.starting import run_on_ranks
from trainwright.integration.text_stream import TextStream


@attrs.frozen
class Request:
    """What is asked for, as plain data that travels to other processes.

    Args:
        place: folder of the model.
        leaves: of the settings.
        prompts: texts to continue.
        num_tokens: at most so many for each.
        rule: arguments of `Sampling`, but for tokens that never come.
        step: of the checkpoint; None for the newest.
        window: tokens that the model sees; None for as many as it is trained on.
        stops: whether the end of a text ends the row; otherwise it never comes.
        as_json: whether results are printed as JSON, one line a prompt.
    """

    place: str
    leaves: dict[str, Any]
    prompts: Sequence[str]
    num_tokens: int
    rule: dict[str, Any]
    step: int | None = None
    window: int | None = None
    stops: bool = True
    as_json: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace, place: Place) -> Self:
        """Return what the options ask for.

        Raises:
            ConfigError: an option is out of its range.
        """
        if options.tokens < 1:
            raise ConfigError(f"--tokens must be at least 1, got {options.tokens}")
        config = settings_for(place, options)
        rule = {
            "temperature": options.temperature,
            "top_k": options.top_k,
            "top_p": options.top_p,
            "seed": config.seed,
        }
        Sampling(**rule)
        return cls(
            place=str(place.path),
            leaves=config.leaves(),
            prompts=options.prompt,
            num_tokens=options.tokens,
            rule=rule,
            step=options.step,
            window=options.window,
            stops=options.stop,
            as_json=options.json,
        )

    def run(self, world: Communicator) -> None:
        """Generate on this rank; the first one prints."""
        place = open_place(Path(self.place))
        parts = assemble_model(RunConfig.from_mapping(self.leaves), world, place.shape())
        place.load(parts, self.step)
        ends = place.ends()
        prompts = [encoded(place, prompt) for prompt in self.prompts]
        drawn = continuations(
            parts,
            prompts,
            self.num_tokens,
            Sampling(**self.rule, banned=frozenset() if self.stops else ends),
            stop=ends if self.stops else (),
            window=self.window,
        )
        printer = _Printer(self, place, prompts, ends if world.rank == 0 else None)
        for tokens in drawn:
            printer.add(tokens)
        printer.end()


def encoded(place: Place, prompt: str) -> list[int]:
    """Return the tokens of a prompt, which begins a document; an empty one is what is before it.

    Raises:
        ConfigError: it is no text; or it is empty, and documents begin with nothing.
    """
    tokenizer = place.tokenizer()
    try:
        content = prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"--prompt holds half a character: {error}") from error
    text = [int(token) for token in tokenizer.encode([content])[0]]
    tokens = [*tokenizer.start, *text]
    if not tokens and tokenizer.end is None:
        raise ConfigError(f"the tokenizer of {place.path} needs a --prompt that is not empty")
    return tokens or [int(tokenizer.end or 0)]


class _Printer:
    """Shows a single continuation as it grows, several ones when all are there."""

    def __init__(
        self,
        request: Request,
        place: Place,
        prompts: Sequence[Sequence[int]],
        ends: frozenset[int] | None,
    ) -> None:
        self._request = request
        self._ends = ends or frozenset()
        self._silent = ends is None
        decode = place.tokenizer().decode
        self._streams = [TextStream(decode, prompt) for prompt in prompts]
        self._texts = [""] * len(prompts)
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._live = len(prompts) == 1 and not request.as_json
        if self._live:
            self._write(request.prompts[0])

    def add(self, tokens: Sequence[int | None]) -> None:
        for row, token in enumerate(tokens):
            if token is not None:
                self._tokens[row].append(token)
            if token is not None and token not in self._ends:
                self._show(row, self._streams[row].add(token))

    def end(self) -> None:
        for row, stream in enumerate(self._streams):
            self._show(row, stream.end())
        if self._live:
            self._write("\n")
            return
        for row, prompt in enumerate(self._request.prompts):
            if self._request.as_json:
                found = {"prompt": prompt, "text": self._texts[row], "tokens": self._tokens[row]}
                self._write(json.dumps(found) + "\n")
            else:
                self._write(f"==> {row + 1} <==\n{prompt}{self._texts[row]}\n")

    def _show(self, row: int, text: str) -> None:
        self._texts[row] += text
        if self._live:
            self._write(text)

    def _write(self, text: str) -> None:
        if self._silent:
            return
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader has seen enough; other ranks go on with this one to the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def add_parser(commands: Any) -> None:
    """Add the command to the tool's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="continue a text with a model",
        description="Print a prompt and what a model continues it with.",
        allow_abbrev=False,
    )
    add_place(parser)
    add = parser.add_argument
    add("--prompt", action="append", required=True, help="text to continue; may be repeated")
    add("--tokens", type=int, default=200, help="tokens to add, at most (default 200)")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest (default 0.8)")
    add("--top-k", type=int, help="only the likeliest so many tokens (default all)")
    add("--top-p", type=float, default=1.0, help="only the likeliest ones with this share together")
    add("--seed", type=int, help="of the draws (default: that of the run)")
    add("--window", type=int, help="tokens that the model sees (default: as in training)")
    add("--stop", action=argparse.BooleanOptionalAction, default=True, help="at the end of a text")
    add("--json", action="store_true", help="print a JSON object a prompt, when all is there")


def run(options: argparse.Namespace) -> int:
    """Generate on as many ranks as the layout has.

    Raises:
        ConfigError: there is no model, or options contradict it.
    """
    return run_on_ranks(Request.of(options, open_place(Path(options.model))), options.comm)
