"""Collectives among rank threads: the last to arrive computes, sleepers help with large ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from trainwright.collectives.calls import Call, Kind, members_by_color
from trainwright.collectives.errors import CollectiveError, UsageError
from trainwright.collectives.local_members import LocalGroup
from trainwright.collectives.local_messages import MessageWork, post
from trainwright.collectives.local_plans import is_large, plan
from trainwright.collectives.parking import Pending
from trainwright.collectives.protocol import Recv, Send, Work
from trainwright.collectives.single import compute_alone
from trainwright.collectives.works import DONE, JoinedWork, poll


class LocalBackend:
    """One rank's hold on a `LocalGroup`."""

    def __init__(self, group: LocalGroup, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.size = group.size
        self.device = device
        self.name = group.name
        self._group = group
        self._world = group.world

    def start(self, call: Call) -> Work:
        """Join the collective that is this rank's next; compute it if this rank is the last."""
        if self.size == 1:
            self._world.check()
            compute_alone(call)
            return DONE
        return self._join(call)

    def exchange(self, messages: Sequence[Send | Recv], timeout_s: float | None) -> Work:
        """Post the receives first, so that the sends find them."""
        posted = [
            post(self._group, self.rank, message)
            for kind in (Recv, Send)
            for message in messages
            if isinstance(message, kind)
        ]
        works = [MessageWork(message, timeout_s) for message in posted]
        return works[0] if len(works) == 1 else JoinedWork(works)

    def start_together(self, pending: Sequence[Call | Sequence[Send | Recv]]) -> list[Work]:
        """Start one after the other: nothing here blocks before ``wait``."""
        return [
            self.start(item) if isinstance(item, Call) else self.exchange(item, None)
            for item in pending
        ]

    def split(self, color: int | None, key: int) -> LocalBackend | None:
        """Meet, let the last rank make the groups, take one's own."""
        work = self._join(Call(Kind.SPLIT, color_and_key=(color, key)))
        meeting = work.meeting
        assert meeting is not None
        work.wait()
        made = meeting.made.get(self.rank)
        if made is None:
            return None
        group, rank = made
        return LocalBackend(group, rank, self.device)

    def abort(self, cause: str) -> None:
        """Fail the whole world, not this group alone."""
        self._world.fail(self._group.ranks[self.rank], cause)

    def _join(self, call: Call) -> _MeetingWork:
        group = self._group
        world = self._world
        if self.device.type == "cuda":
            call.event = torch.cuda.current_stream(self.device).record_event()
        with world.mutex:
            if world.failure is not None:
                world.check()
            number = group.num_started[self.rank]
            group.num_started[self.rank] = number + 1
            meeting = group.meetings.get(number)
            if meeting is None:
                meeting = group.meetings[number] = Meeting(group, number)
            meeting.join_locked(self.rank, call)
            is_last = meeting.num_arrived == group.size
            if is_last:
                del group.meetings[number]
        if is_last and not meeting.ready:
            meeting.compute()
        return _MeetingWork(meeting, self.rank, call.timeout_s, self.device)


class Meeting(Pending):
    """One collective of one group, from the first arrival to the result."""

    __slots__ = (
        "calls", "counter", "done_event", "group", "made", "num_arrived", "num_left", "number",
        "tasks",
    )  # fmt: skip

    def __init__(self, group: LocalGroup, number: int) -> None:
        super().__init__()
        self.group = group
        self.number = number
        self.calls: list[Call | None] = [None] * group.size
        self.num_arrived = 0
        self.made: dict[int, tuple[LocalGroup, int]] = {}
        self.tasks: list[Callable[[], None]] = []
        self.counter = itertools.count()
        self.num_left = 0
        self.done_event: torch.cuda.Event | None = None

    def join_locked(self, rank: int, call: Call) -> None:
        """Take in one rank's call; the caller holds the mutex."""
        self.calls[rank] = call
        self.num_arrived += 1
        if self.num_arrived == 1 or self.ready:
            return
        first = next(other for other in self.calls if other is not None and other is not call)
        if not call.agrees_with(first):
            self.group.world.finish_locked(self, (UsageError, self._describe_mismatch()))

    def compute(self) -> None:
        """Do the work, alone if it is small; called by the last rank to arrive."""
        try:
            calls = [call for call in self.calls if call is not None]
            if calls[0].kind is Kind.SPLIT:
                self._make_groups(calls)
            else:
                tasks = plan(calls)
                if calls[0].event is not None:
                    self._launch(calls, tasks)
                elif is_large(calls):
                    self._share(tasks)
                    return
                else:
                    with _writing():
                        for task in tasks:
                            task()
        except CollectiveError as error:
            self.group.world.finish(self, (type(error), str(error)))
        except Exception as error:
            self.group.world.finish(self, (CollectiveError, f"{self}: {error!r}"))
        else:
            self.group.world.finish(self)

    def help(self) -> None:
        """Run tasks nobody has taken yet."""
        world = self.group.world
        num_tasks = len(self.tasks)
        num_done = 0
        with _writing():
            while (index := next(self.counter)) < num_tasks:
                try:
                    self.tasks[index]()
                except Exception as error:
                    world.finish(self, (CollectiveError, f"{self}: {error!r}"))
                num_done += 1
        if num_done:
            with world.mutex:
                self.num_left -= num_done
                if self.num_left == 0:
                    world.finish_locked(self)

    def describe(self) -> str:
        """Say what it is, who is missing, and how far all have come."""
        group = self.group
        missing = [rank for rank, call in enumerate(self.calls) if call is None]
        who = ", ".join(group.describe_rank(rank) for rank in missing) or "nobody"
        return f"{self}; missing: {who}; {group.describe_progress()}"

    def __str__(self) -> str:
        call = next(call for call in self.calls if call is not None)
        return f"collective {self.number} of {self.group.name!r}, {call}"

    def _share(self, tasks: list[Callable[[], None]]) -> None:
        world = self.group.world
        with world.mutex:
            self.num_left = len(tasks)
            self.tasks = tasks
            world.wake_locked(self)
        self.help()

    def _launch(self, calls: Sequence[Call], tasks: Sequence[Callable[[], None]]) -> None:
        # The kernels of all ranks' inputs come before ours, and ours before the ranks' next ones.
        tensor = next((call.input for call in calls if call.input is not None), None)
        if tensor is None:
            return
        stream = torch.cuda.current_stream(tensor.device)
        for call in calls:
            if call.event is not None:
                stream.wait_event(call.event)
        with _writing():
            for task in tasks:
                task()
        for call in calls:
            for used in (call.input, call.output):
                if used is not None:
                    used.record_stream(stream)
        self.done_event = stream.record_event()

    def _make_groups(self, calls: Sequence[Call]) -> None:
        group = self.group
        table = []
        for call in calls:
            assert call.color_and_key is not None
            color, key = call.color_and_key
            table.append((0 if color is None else 1, color or 0, key))
        for color, ranks in members_by_color(table).items():
            made = LocalGroup(
                group.world,
                [group.ranks[rank] for rank in ranks],
                f"{group.name}/{self.number}.{color}",
                group.buffered_sends,
            )
            for new_rank, rank in enumerate(ranks):
                self.made[rank] = (made, new_rank)

    def _describe_mismatch(self) -> str:
        group = self.group
        parts = [
            f"{group.describe_rank(rank)} called {call}"
            for rank, call in enumerate(self.calls)
            if call is not None
        ]
        return (
            f"collective {self.number} of {group.name!r} differs between ranks: "
            f"{'; '.join(parts)}. All ranks must call the same operations in the same order with "
            "the same shapes, dtypes and arguments"
        )


def _writing() -> AbstractContextManager[object]:
    # A rank writes the tensors of others, which may have been made in inference mode or outside;
    # only inside it both may be written.
    return torch.inference_mode()


class _MeetingWork:
    __slots__ = ("_device", "_rank", "_timeout_s", "meeting")

    def __init__(
        self, meeting: Meeting, rank: int, timeout_s: float | None, device: torch.device
    ) -> None:
        self.meeting: Meeting | None = meeting
        self._rank = rank
        self._timeout_s = timeout_s
        self._device = device

    def wait(self, timeout_s: float | None = None) -> None:
        meeting = self.meeting
        if meeting is None:
            return
        while not meeting.ready:
            if meeting.tasks:
                meeting.help()
            if not meeting.ready:
                meeting.group.world.sleep(meeting, self._rank, timeout_s or self._timeout_s)
        if meeting.error is not None:
            kind, text = meeting.error
            raise kind(text)
        if meeting.done_event is not None:
            torch.cuda.current_stream(self._device).wait_event(meeting.done_event)
        finished = meeting.group.num_finished
        finished[self._rank] = max(finished[self._rank], meeting.number + 1)
        self.meeting = None

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether all ranks have come and the result is there."""
        return poll(self._is_over, within_s)

    def _is_over(self) -> bool:
        meeting = self.meeting
        if meeting is None or meeting.group.world.failure is not None:
            return True
        if not meeting.ready or meeting.done_event is None:
            return meeting.ready
        return bool(meeting.done_event.query())  # type: ignore[no-untyped-call]
