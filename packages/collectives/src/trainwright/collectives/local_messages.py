"""Messages between rank threads: matched by sender, receiver and tag, in order."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from trainwright.collectives.calls import describe_tensor
from trainwright.collectives.errors import UsageError
from trainwright.collectives.parking import Pending
from trainwright.collectives.protocol import Recv, Send
from trainwright.collectives.works import poll

if TYPE_CHECKING:
    from trainwright.collectives.local_members import LocalGroup


class Message(Pending):
    """One side of a message, sent or received, until its other side has come."""

    __slots__ = ("event", "group", "is_queued", "is_send", "peer", "rank", "tag", "tensor")

    def __init__(self, group: LocalGroup, rank: int, message: Send | Recv) -> None:
        super().__init__()
        self.group = group
        self.rank = rank
        self.tensor = message.tensor
        self.peer = message.peer
        self.tag = message.tag
        self.is_send = isinstance(message, Send)
        self.is_queued = False
        self.event: torch.cuda.Event | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Sender, receiver and tag."""
        ends = (self.rank, self.peer) if self.is_send else (self.peer, self.rank)
        return (*ends, self.tag)

    def describe(self) -> str:
        """Say what it is and whose side is missing."""
        if self.is_send:
            verb, other, preposition = "send", "receive", "to"
        else:
            verb, other, preposition = "recv", "send", "from"
        return (
            f"{verb}({describe_tensor(self.tensor)}, tag={self.tag}) {preposition} rank "
            f"{self.peer} of {self.group.name!r}; missing: "
            f"{self.group.describe_rank(self.peer)} did not {other}"
        )


def post(group: LocalGroup, rank: int, request: Send | Recv) -> Message:
    """Put up one side of a message; if the other side is there already, transfer it."""
    world = group.world
    message = Message(group, rank, request)
    if message.tensor.is_cuda:
        message.event = torch.cuda.current_stream(message.tensor.device).record_event()
    key = message.key
    with world.mutex:
        world.check()
        queue = group.mail.get(key)
        if queue is None:
            queue = group.mail[key] = deque()
        if not queue or queue[0].is_send == message.is_send:
            message.is_queued = True
            queue.append(message)
            return message
        other = queue.popleft()
        other.is_queued = False
        if not queue:
            del group.mail[key]
    if message.is_send:
        _transfer(message, other)
    else:
        _transfer(other, message)
    return message


def _transfer(sent: Message, received: Message) -> None:
    error = None
    if sent.tensor.shape != received.tensor.shape or sent.tensor.dtype != received.tensor.dtype:
        group = sent.group
        error = (
            UsageError,
            f"message of tag {sent.tag} in {group.name!r}: {group.describe_rank(sent.rank)} sends "
            f"{describe_tensor(sent.tensor)}, {group.describe_rank(received.rank)} receives into "
            f"{describe_tensor(received.tensor)}; shape and dtype must be alike",
        )
    else:
        _copy(sent, received)
    world = sent.group.world
    with world.mutex:
        world.finish_locked(sent, error)
        world.finish_locked(received, error)


def _copy(sent: Message, received: Message) -> None:
    # Only in inference mode may tensors made inside and outside of it be written.
    with torch.inference_mode():
        if sent.event is None or received.event is None:
            received.tensor.copy_(sent.tensor)
            return
        stream = torch.cuda.current_stream(received.tensor.device)
        stream.wait_event(sent.event)
        stream.wait_event(received.event)
        received.tensor.copy_(sent.tensor)
        sent.tensor.record_stream(stream)
        received.tensor.record_stream(stream)
        sent.event = received.event = stream.record_event()


class MessageWork:
    """The Work of one message; a send that is waited for early is copied aside."""

    __slots__ = ("_message", "_timeout_s")

    def __init__(self, message: Message, timeout_s: float | None) -> None:
        self._message: Message | None = message
        self._timeout_s = timeout_s

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the buffer may be used again."""
        message = self._message
        if message is None:
            return
        if not message.ready and message.is_send and message.group.buffered_sends:
            _buffer(message)
        world = message.group.world
        while not message.ready:
            world.sleep(message, message.rank, timeout_s or self._timeout_s)
        if message.error is not None:
            kind, text = message.error
            raise kind(text)
        if message.event is not None:
            torch.cuda.current_stream(message.tensor.device).wait_event(message.event)
        self._message = None

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether the peer has come, or need not."""
        return poll(self._is_over, within_s)

    def _is_over(self) -> bool:
        message = self._message
        if message is None:
            return True
        if message.group.world.failure is not None:
            return True
        if not message.ready:
            return message.is_send and message.group.buffered_sends
        return message.event is None or bool(message.event.query())  # type: ignore[no-untyped-call]


def _buffer(message: Message) -> None:
    copy = message.tensor.clone()
    world = message.group.world
    with world.mutex:
        if message.is_queued:
            message.tensor = copy
            world.finish_locked(message)
