"""Vocabularies of the `tokenizers` library: learned of the data, or read from a file."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from trainwright.integration.data.tokenizer import (
    BYTES,
    ByteTokenizer,
    NumberTokenizer,
    Tokenizer,
    smallest_dtype,
)
from trainwright.integration.errors import ConfigError, DataError
from trainwright.integration.outside_files import read_object, read_text

END_OF_TEXT = "<|endoftext|>"
TURN = ("<|im_start|>", "<|im_end|>")
"""What begins and ends a message of a conversation."""

ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", TURN[1])
"""Names of the token behind a document, where nothing says which it is; the first that is known."""

FILE = "tokenizer.json"
MOST_BYTES = 1 << 28
"""A file of a tokenizer has less."""

MOST_TOKENS = 1 << 24
"""Tokens that a vocabulary may have; beyond any that was made."""

SMALLEST_BPE = 256 + 1 + len(TURN)

Training = Callable[[], Iterable[bytes]]
"""The training documents, from the beginning."""


class LearnedTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
        content: what a ``tokenizer.json`` holds.
        end: name of the token behind each document; None takes the first that is known of `ENDS`.
        where: name of the file in errors.

    Raises:
        ConfigError: the content is no tokenizer, or lacks the end token.
    """

    def __init__(self, content: str, *, end: str | None = None, where: str = FILE) -> None:
        self._where = where
        with _refusing(f"{where} is no tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        names = ENDS if end is None else (end,)
        known = [name for name in names if self.special(name) is not None]
        if not known:
            raise ConfigError(
                f"{where} has no token {' or '.join(names)} to stand behind documents; "
                "--end-token names one"
            )
        self.end_name = known[0]
        self.end: int | None = self._tokenizer.token_to_id(known[0])
        with _refusing(f"{where} cannot encode a text"):
            around = self._tokenizer.encode("").ids
        self.start = tuple(token for token in around if token != self.end)
        # Numbers may have gaps, which the model's table needs rows for.
        numbers = list(self._tokenizer.get_vocab().values())
        if len(set(numbers)) < len(numbers):
            # Which of the two a number means would change from one start to the next.
            twice = next(number for number, count in Counter(numbers).items() if count > 1)
            raise ConfigError(f"{where} has two tokens of number {twice}; each needs its own")
        self.vocabulary = 1 + max([*numbers, *around])
        if self.vocabulary > MOST_TOKENS:
            raise ConfigError(
                f"{where} has a token of number {self.vocabulary - 1}; numbers below "
                f"{MOST_TOKENS} work, since a model has a row for each"
            )
        self.dtype = smallest_dtype(self.vocabulary)
        # What users write is text, also where it looks like the end of a message.
        self._tokenizer.encode_special_tokens = True
        self._content = content

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the tokens of each text, all of them by as many threads as there are cores."""
        decoded = [text.decode("utf-8") for text in texts]
        with _refusing(f"{self._where} cannot encode the text"):
            found = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(each.ids, dtype=self.dtype) for each in found]

    def special(self, text: str) -> int | None:
        """Return the token of that name, or None."""
        try:
            token: int | None = self._tokenizer.token_to_id(text)
        except UnicodeEncodeError:
            # Half a character is the name of nothing.
            return None
        return token

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens, special ones by their names."""
        text: str = self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)
        return text

    def sizes(self) -> np.ndarray | None:
        """Return the bytes of each token where they are those of a byte-level alphabet."""
        return self._sizes

    @functools.cached_property
    def _sizes(self) -> np.ndarray | None:
        if not isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            return None
        found = np.zeros(self.vocabulary, np.int64)
        for text, token in self._tokenizer.get_vocab().items():
            # One character of this alphabet stands for one byte.
            found[token] = len(text)
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            found[token] = 0 if added.special else len(added.content.encode())
        return found

    def describe(self) -> str:
        """Return the whole content of its file, and the end token."""
        return f"{self._content}\n{self.end_name}"

    @property
    def content(self) -> str:
        """What its ``tokenizer.json`` holds."""
        return self._content


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raise what the library raises, plain exceptions and panics of its own, as our error."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{what}: {error}") from error


def train_bpe(texts: Iterable[bytes], vocabulary: int) -> LearnedTokenizer:
    """Learn byte pairs of texts, the same from the same texts.

    The tokens are the end of a document, the marks around a message, 256 bytes and pairs of tokens.

    Args:
        texts: UTF-8.
        vocabulary: number of tokens.

    Raises:
        DataError: the texts have too few different words to learn as many.
    """
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, *TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    built.train_from_iterator((text.decode("utf-8") for text in texts), trainer)
    found = built.get_vocab_size()
    if found < vocabulary:
        raise DataError(
            f"--tokenizer bpe:{vocabulary}: the training documents give {found} tokens and no "
            f"more; bpe:{found} works"
        )
    return LearnedTokenizer(built.to_str(pretty=True))


def parse_number(spec: str, kind: str, least: int) -> int | None:
    """Return N of ``kind:N``, or None where it is another kind.

    Raises:
        ConfigError: N is no whole number, or too small.
    """
    if not spec.startswith(f"{kind}:"):
        return None
    text = spec.removeprefix(f"{kind}:")
    if not (text.isascii() and text.isdecimal()) or not least <= int(text) < 2**31:
        raise ConfigError(
            f"--tokenizer {spec}: {kind}:N takes a whole number of tokens from {least} on"
        )
    return int(text)


def read_tokenizer(path: Path, end: str | None = None) -> LearnedTokenizer:
    """Read a ``tokenizer.json``, or the one of a folder, whose other files say how texts end.

    Args:
        path: the file or the folder.
        end: name of the token behind each document; None for what the folder says.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    file = path / FILE if os.path.isdir(path) else path
    try:
        content = read_text(file, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tokenizer {path}: cannot read {file}: {error}; give bytes, bpe:N, ids:N, or a "
            "tokenizer.json or the folder of one"
        ) from error
    return LearnedTokenizer(content, end=end or _configured_end(file.parent), where=str(file))


def _configured_end(folder: Path) -> str | None:
    path = folder / "tokenizer_config.json"
    try:
        configured = read_object(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    end = configured.get("eos_token")
    if isinstance(end, dict):
        end = end.get("content")
    return end if isinstance(end, str) else None


def make_tokenizer(spec: str, training: Training, end: str | None = None) -> Tokenizer:
    """Return the tokenizer that an option names.

    Args:
        spec: ``bytes``, ``bpe:N`` for one learned of the training documents, ``ids:N``, or the
            path of a ``tokenizer.json`` or of its folder.
        training: called where one is learned.
        end: name of the token behind each document.

    Raises:
        ConfigError: the spec is none of these.
        DataError: the documents give too few tokens.
    """
    if spec == BYTES:
        return ByteTokenizer()
    number = parse_number(spec, "ids", 1)
    if number is not None:
        return NumberTokenizer(number)
    number = parse_number(spec, "bpe", SMALLEST_BPE)
    if number is not None:
        return train_bpe(training(), number)
    return read_tokenizer(Path(spec), end)


def vocabulary_of(spec: str, end: str | None = None) -> int:
    """Return how many tokens the tokenizer of an option has, without any data.

    Raises:
        ConfigError: the spec is none that `make_tokenizer` takes.
    """
    number = parse_number(spec, "bpe", SMALLEST_BPE)
    return number or make_tokenizer(spec, lambda: (), end).vocabulary
