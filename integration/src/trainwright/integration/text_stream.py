"""Text of tokens that come one by one: whole characters only, as they become known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 4
"""Tokens before the first one that is shown which its text may depend on: spaces, mostly."""

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes a growing row of tokens.

    What a token means may depend on those before it, so that new ones are decoded together with a
    few old ones. What is shown adds up to the text of all tokens.

    Args:
        decode: returns the text of tokens, with a U+FFFD for a character that has only begun.
        context: tokens before the first one, whose text is not shown again.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context)[-CONTEXT:]
        # Where text was last complete, and how much of what is decoded has been shown.
        self._complete = len(self._tokens)
        self._shown = len(decode(self._tokens))

    def add(self, token: int) -> str:
        """Return the text that one more token makes known: nothing within a character."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        # The last one may be a character that has only begun; those before it are none.
        is_complete = not text.endswith(_UNKNOWN)
        new = text[self._shown :] if is_complete else text[self._shown : -1]
        self._shown += len(new)
        if is_complete:
            del self._tokens[: self._complete]
            self._complete = len(self._tokens)
            self._shown = len(self._decode(self._tokens))
        return new

    def end(self) -> str:
        """Return what was held back."""
        return self._decode(self._tokens)[self._shown :]
