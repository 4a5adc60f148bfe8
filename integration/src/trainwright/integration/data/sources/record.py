"""What sources hold, in order: documents and conversations, each with a name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import attrs

from trainwright.integration.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
UNSAID = ("tool_calls", "function_call")
"""What a message may do besides its content, and a model would have to learn."""


@attrs.frozen
class Document:
    """A text.

    Args:
        name: the same in every run; it decides whether the document is held out.
        pieces: the text in UTF-8, one after another, cut behind line ends where it is long.
    """

    name: str
    pieces: Iterable[bytes]


@attrs.frozen
class Message:
    """What somebody says in a conversation."""

    role: str
    content: str


@attrs.frozen
class Conversation:
    """Messages, of which the assistant's are learnt."""

    name: str
    messages: tuple[Message, ...]


Record = Document | Conversation


class Source(Protocol):
    """Records in an order that never changes."""

    @property
    def source(self) -> Path:
        """The file or the folder."""
        ...

    @property
    def candidates(self) -> list[Path]:
        """The files that are looked at, found without reading any."""
        ...

    @property
    def files(self) -> int:
        """Number of files that are read."""
        ...

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of files that are left out, since they are not text."""
        ...

    def split(self, share: float) -> Iterator[tuple[bool, Record]]:
        """Go through all records once more, in order, each with whether it is held out.

        Args:
            share: share of what is held out, between 0 and 1; 0 for nothing.

        Raises:
            DataError: something cannot be read as the format says.
        """
        ...

    def fingerprint(self) -> str:
        """Return hexadecimal digits that change with the content, whatever its place."""
        ...


def record_of(name: str, value: object, *, chat: bool, where: str) -> Record:
    """Return what a row of a source holds.

    Args:
        name: name of the row.
        value: text; or with ``chat`` a list of {"role", "content"}.
        chat: whether rows are conversations.
        where: where the row is, for errors.

    Raises:
        DataError: the value is something else.
    """
    if chat:
        return Conversation(name, _messages_of(value, where))
    if not isinstance(value, str):
        raise DataError(f"{where}: the text must be a string, got {type(value).__name__}")
    return Document(name, (_encoded(value, where),))


def _messages_of(value: object, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}: messages must be a list of {{role, content}}, got {str(value)[:60]!r}"
        )
    found = tuple(_message_of(each, where) for each in value)
    if not any(message.role == "assistant" for message in found):
        raise DataError(f"{where}: no message is the assistant's, so that nothing is learnt")
    return found


def _message_of(value: Any, where: str) -> Message:
    if not isinstance(value, dict) or not {"role", "content"} <= value.keys():
        raise DataError(f"{where}: a message must have role and content, got {str(value)[:60]!r}")
    role, content = value["role"], value["content"]
    for name in UNSAID:
        if value.get(name):
            raise DataError(
                f"{where}: a message has {name}, for which the built-in template has no words; "
                "write it into content, or leave the conversation out"
            )
    if role not in ROLES or not isinstance(content, str):
        raise DataError(
            f"{where}: role must be one of {', '.join(ROLES)} and content a string, "
            f"got {str(role)[:20]!r} and {type(content).__name__}"
        )
    _encoded(content, where)
    return Message(role, content)


def _encoded(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the text holds half a character: {error}") from error
