"""What turns text into tokens and back; bytes, and numbers without text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from trainwright.integration.errors import ConfigError

BYTES = "bytes"


class Tokenizer(Protocol):
    """Turns text into tokens and back."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens; all are below it."""
        ...

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The smallest kind of whole number that holds all tokens."""
        ...

    @property
    def end(self) -> int | None:
        """The token behind each document; None where nobody knows."""
        ...

    @property
    def start(self) -> tuple[int, ...]:
        """The tokens before each document."""
        ...

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the tokens of each text; names of special tokens in it are text like any other."""
        ...

    def special(self, text: str) -> int | None:
        """Return the special token of that name, or None."""
        ...

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens; what is no text of its own is shown somehow."""
        ...

    def sizes(self) -> np.ndarray | None:
        """Return the bytes of text of each token, int64 [vocabulary]; None where nobody knows."""
        ...

    def describe(self) -> str:
        """Return what tells this tokenizer from all others."""
        ...


class ByteTokenizer:
    """Every byte is a token; the zero byte, which text does not hold, stands behind documents."""

    vocabulary = 256
    dtype = np.uint8
    end = 0
    start = ()

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the bytes of each text."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def special(self, text: str) -> int | None:
        """Return None: but for the zero byte no byte is special."""
        return None

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of bytes, with a mark for those that are no text."""
        return bytes(np.asarray(tokens, dtype=np.uint8)).decode("utf-8", errors="replace")

    def sizes(self) -> np.ndarray:
        """Return one for every byte."""
        return np.ones(self.vocabulary, np.int64)

    def describe(self) -> str:
        """Return the word for bytes."""
        return BYTES


class NumberTokenizer:
    """Tokens whose text nobody knows, shown as numbers.

    Args:
        vocabulary: number of tokens.
    """

    end = None
    start = ()

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.dtype = smallest_dtype(vocabulary)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Refuse: there is no text.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"--tokenizer ids:{self.vocabulary} knows numbers only, and the data is text; "
            "give bytes, bpe:N or a tokenizer.json"
        )

    def special(self, text: str) -> int | None:
        """Return None: no token has a name."""
        return None

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the numbers with spaces between them."""
        return " ".join(str(int(token)) for token in tokens)

    def sizes(self) -> None:
        """Return None."""
        return

    def describe(self) -> str:
        """Return the number of tokens."""
        return f"ids:{self.vocabulary}"


def smallest_dtype(vocabulary: int) -> type[np.unsignedinteger[Any]]:
    """Return the smallest of uint8, uint16 and uint32 that holds all tokens."""
    if vocabulary <= 1 << 8:
        return np.uint8
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32
