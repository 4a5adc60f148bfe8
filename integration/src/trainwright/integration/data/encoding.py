"""Documents and conversations as tokens, many at once and in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import numpy as np

from trainwright.integration.data.learned import TURN
from trainwright.integration.data.sources.record import Conversation, Document, Record
from trainwright.integration.data.tokenizer import ByteTokenizer, Tokenizer
from trainwright.integration.errors import DataError

BATCH_BYTES = 1 << 22
"""Bytes of text that are encoded in one call, which shares them out over cores."""

BATCH_PARTS = 1 << 13


@attrs.frozen(eq=False)
class Part:
    """A part of a record: text to encode, or tokens.

    Args:
        held_out: whether the record is held out.
        content: UTF-8, or tokens.
        counts: whether its tokens are targets.
        ends: whether a document ends behind it.
    """

    held_out: bool
    content: bytes | tuple[int, ...]
    counts: bool = True
    ends: bool = False


@attrs.frozen(eq=False)
class EncodedPart:
    """The tokens of a part."""

    part: Part
    tokens: np.ndarray


def encoded(records: Iterable[tuple[bool, Record]], tokenizer: Tokenizer) -> Iterator[EncodedPart]:
    """Go through records as tokens, in order, with the marks around them.

    Args:
        records: each with whether it is held out.
        tokenizer: what encodes them.
    """
    waiting: list[Part] = []
    size = 0
    for held_out, record in records:
        for part in parts_of(record, held_out, tokenizer):
            waiting.append(part)
            size += len(part.content)
            if size >= BATCH_BYTES or len(waiting) >= BATCH_PARTS:
                yield from _encode(waiting, tokenizer)
                waiting, size = [], 0
    yield from _encode(waiting, tokenizer)


def parts_of(record: Record, held_out: bool, tokenizer: Tokenizer) -> Iterator[Part]:
    """Return the parts of a record: the start, the text or the messages, and the end token."""
    if tokenizer.start:
        yield Part(held_out, tokenizer.start, counts=False)
    if isinstance(record, Document):
        for piece in record.pieces:
            yield Part(held_out, piece)
    else:
        yield from _messages(record, held_out, tokenizer)
    end = () if tokenizer.end is None else (tokenizer.end,)
    yield Part(held_out, end, counts=isinstance(record, Document), ends=True)


def _messages(record: Conversation, held_out: bool, tokenizer: Tokenizer) -> Iterator[Part]:
    begin, end = (_mark(name, tokenizer) for name in TURN)
    for message in record.messages:
        learnt = message.role == "assistant"
        yield Part(held_out, begin, counts=False)
        yield Part(held_out, f"{message.role}\n".encode(), counts=False)
        yield Part(held_out, message.content.encode(), counts=learnt)
        # Where an answer ends is learnt with it.
        yield Part(held_out, end, counts=learnt)
        yield Part(held_out, b"\n", counts=False)


def _mark(name: str, tokenizer: Tokenizer) -> bytes | tuple[int, ...]:
    token = tokenizer.special(name)
    if token is not None:
        return (token,)
    if not isinstance(tokenizer, ByteTokenizer):
        # Spelt out in other tokens, the model would not learn to end its answers.
        raise DataError(
            f"--chat puts {' and '.join(TURN)} around messages, and the vocabulary has no token "
            f"{name}; take one that has both, or --tokenizer bpe:N, which learns them. Other chat "
            "templates are not available yet"
        )
    return name.encode()


def _encode(parts: list[Part], tokenizer: Tokenizer) -> Iterator[EncodedPart]:
    texts = [part.content for part in parts if isinstance(part.content, bytes)]
    try:
        tokens = iter(tokenizer.encode(texts) if texts else [])
    except UnicodeDecodeError as error:
        raise DataError(f"the data is not UTF-8: {error}") from error
    for part in parts:
        if isinstance(part.content, bytes):
            yield EncodedPart(part, next(tokens))
        else:
            yield EncodedPart(part, np.array(part.content, dtype=tokenizer.dtype))
