"""Collectives over Gloo's point-to-point messages between processes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from trainwright.collectives import direct
from trainwright.collectives.background import Background, all_of
from trainwright.collectives.call_log import CallLog
from trainwright.collectives.calls import Call, Kind, describe_tensor, members_by_color
from trainwright.collectives.errors import CollectiveTimeoutError, UsageError
from trainwright.collectives.failures import Failure, FailureBoard
from trainwright.collectives.gloo_exit import end_threads, wake
from trainwright.collectives.gloo_questions import Questions
from trainwright.collectives.gloo_tags import MAX_TAG, Tags
from trainwright.collectives.gloo_watch import CallWatch
from trainwright.collectives.gloo_work import GlooWork, Ticket
from trainwright.collectives.grad_mode import without_grad
from trainwright.collectives.protocol import Recv, Send, Work
from trainwright.collectives.rendezvous import Link, Store, connect, nest
from trainwright.collectives.scratch import Scratch
from trainwright.collectives.single import compute_alone
from trainwright.collectives.works import DONE

# Peer, whether it is a receive, tensor, tag.
_Posting = tuple[int, bool, torch.Tensor, int]

# Works nobody waited for are kept while their messages are under way, up to this many.
_MAX_DROPPED = 1024


class GlooBackend:
    """One rank's end of a group of processes connected by Gloo.

    Args:
        store: where the ranks of this group, and nobody else, find each other.
        rank: this rank in the group.
        ranks: the group's ranks, counted in the world.
        name: for messages.
        timeout_s: how long operations wait for peers.
        board: where failures of the world are told.
        watch: compares the calls of ranks that are stuck; None makes one. Groups that are split
            from this one share it.

    Communicates:
        Connects every two ranks; all ranks construct together.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        name: str,
        timeout_s: float,
        board: FailureBoard,
        watch: CallWatch | None = None,
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.device = torch.device("cpu")
        self.name = name
        self.ranks = tuple(ranks)
        self.timeout_s = timeout_s
        self.board = board
        self.dropped: list[GlooWork] = []
        self.scratch = Scratch()
        self._store = store
        self._tags = Tags()
        self.log = CallLog(rank)
        self._num_splits = 0
        self.questions = Questions(nest(store, "questions"), rank)
        self._watch = CallWatch(board) if watch is None else watch
        self.works: weakref.WeakSet[GlooWork] = weakref.WeakSet()
        self._watchers: dict[tuple[int, ...], Background] = {}
        self._background = Background(f"{name}, rank {rank}")
        # Gloo's threads must end before the interpreter does.
        self._group: list[Link] = [] if self.size == 1 else [self._connect()]
        threads = (self._background, self._watchers)
        weakref.finalize(self, end_threads, self._group, rank, self.size, self.works, *threads)
        board.watch(self)
        if self.size > 1:
            # Nobody may leave again before all have come.
            self.start(Call(Kind.BARRIER)).wait()
            self.log = CallLog(rank)
            self._watch.add(self)

    def start(self, call: Call) -> Work:
        """Post all messages that need nothing from others; the rest follows in the background."""
        if self.size == 1:
            self.board.check()
            compute_alone(call)
            return DONE
        with without_grad():
            plan = direct.plan(call, self.rank, self.size, self.scratch)
        # Not before: a call that fails here alone must not count, or later ones would differ.
        self.log.start(call)
        first, second = self._tags.of_collective(call)
        work = GlooWork(self, call, call.timeout_s)
        tickets = self._post_parts(plan.receives, plan.sends, first, call)
        work.start(tickets, plan.finish, plan.scratch, (plan, call))
        if plan.between is not None:
            between = plan.between
            work.start_late(self._post_parts(plan.late_receives, (), second, call))
            self._background.run(
                lambda: work.send_late(lambda: self._post_parts((), between(), second, call))
            )
        self.works.add(work)
        return work

    def exchange(self, messages: Sequence[Send | Recv], timeout_s: float | None) -> Work:
        """Post the messages in the order in which they stand."""
        if not messages:
            self.board.check()
            return DONE
        postings: list[_Posting] = []
        for message in messages:
            if not 0 <= message.tag <= MAX_TAG:
                raise UsageError(f"tag={message.tag} must be between 0 and {MAX_TAG} on Gloo")
            tag = self._tags.of_message(message)
            postings.append((message.peer, isinstance(message, Recv), message.tensor, tag))
        what = _Messages(messages)
        tickets = self._post(postings, what)
        work = GlooWork(self, what, timeout_s)
        work.start(tickets, None, None, messages)
        self.works.add(work)
        return work

    def start_together(self, pending: Sequence[Call | Sequence[Send | Recv]]) -> list[Work]:
        """Start one after the other: starting never waits for a peer."""
        return [
            self.start(item) if isinstance(item, Call) else self.exchange(item, None)
            for item in pending
        ]

    def split(self, color: int | None, key: int) -> GlooBackend | None:
        """Exchange colors and keys, then connect the ranks of this rank's color."""
        mine = torch.tensor([0 if color is None else 1, color or 0, key])
        table = torch.empty((self.size, 3), dtype=torch.int64)
        shape = (1, 3)
        self.start(Call(Kind.SPLIT, table, mine.view(shape), shape, mine.dtype)).wait()
        number = self._num_splits
        self._num_splits += 1
        if color is None:
            return None
        order = members_by_color(table.tolist())[color]
        label = f"{number}.{color}"
        return GlooBackend(
            nest(self._store, label),
            order.index(self.rank),
            [self.ranks[rank] for rank in order],
            f"{self.name}/{label}",
            self.timeout_s,
            self.board,
            self._watch,
        )

    def abort(self, cause: str) -> None:
        """Tell the world and close this rank's connections, which wakes the peers."""
        self.board.publish(Failure(self.board.rank, cause))

    def close(self) -> None:
        """Drop the connections of this group."""
        works = [*all_of(self.works), *self.dropped]
        # A thread that waits keeps the connections open.
        if any(work.is_awaited for work in works):
            for link in tuple(self._group):
                wake(link, self.rank, self.size)
        for work in works:
            work.close()
        self.dropped.clear()
        self._background.stop()
        for watcher in self._watchers.values():
            watcher.stop()
        self._watchers.clear()
        self._group.clear()

    def watcher(self, senders: Sequence[int]) -> Background:
        """Return the thread that waits for messages of these ranks, one work after the other.

        Works of other senders do not stand behind those of a late one.
        """
        key = tuple(senders)
        if key not in self._watchers:
            self._watchers[key] = Background(f"{self.name}, watching ranks {list(key)}")
        return self._watchers[key]

    def explain(
        self, error: Exception, what: object, peer: int, missing: Sequence[int] = ()
    ) -> Exception:
        """Turn an error of Gloo into one that names ranks, and tell the world."""
        late = sorted(set(missing))
        return self.board.explain(
            error,
            what,
            self.name,
            [self.ranks[rank] for rank in late],
            self.ranks[peer] if peer >= 0 else None,
            self.log.tell(late, self.ranks),
        )

    def _connect(self) -> Link:
        try:
            return connect(self._store, self.rank, self.ranks, self.timeout_s)
        except TimeoutError as error:
            raise CollectiveTimeoutError(f"{self.name!r}: {error}") from error
        except RuntimeError as error:
            raise self.explain(error, "connecting", peer=-1) from error

    def _post_parts(
        self,
        receives: Sequence[direct.Part],
        sends: Sequence[direct.Part],
        tag: int,
        call: Call,
    ) -> list[Ticket]:
        of_part = self._tags.of_part
        postings = [(peer, True, part, of_part(tag, part.numel())) for peer, part in receives]
        postings += [(peer, False, part, of_part(tag, part.numel())) for peer, part in sends]
        return self._post(postings, call)

    def _post(self, postings: Sequence[_Posting], what: object) -> list[Ticket]:
        self.board.check()
        if len(self.dropped) > _MAX_DROPPED:
            self._finish_dropped()
        try:
            group = self._group[0]
        except IndexError:
            # Another thread has closed the group since the check.
            self.board.check()
            raise
        peer = -1
        tickets: list[Ticket] = []
        try:
            for peer, is_receive, tensor, tag in postings:
                if tensor.numel():
                    post = group.recv if is_receive else group.send
                    tickets.append((peer, is_receive, post([tensor], peer, tag)))
        except RuntimeError as error:
            tickets.clear()
            del group
            raise self.explain(error, what, peer) from None
        return tickets

    def _finish_dropped(self) -> None:
        old = self.dropped[: _MAX_DROPPED // 2]
        del self.dropped[: _MAX_DROPPED // 2]
        for work in old:
            work.wait()


class _Messages:
    """Names an exchange only where it is asked for."""

    def __init__(self, messages: Sequence[Send | Recv]) -> None:
        self._messages = messages

    def __str__(self) -> str:
        parts = [
            f"{type(message).__name__.lower()}({describe_tensor(message.tensor)}, "
            f"peer={message.peer}, tag={message.tag})"
            for message in self._messages
        ]
        return parts[0] if len(parts) == 1 else f"exchange({', '.join(parts)})"
