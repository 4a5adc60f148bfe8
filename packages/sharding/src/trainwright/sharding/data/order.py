"""The order in which all ranks gather units, learned once and then followed without a word."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NoReturn

from trainwright.collectives import Communicator
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.lesson import DONE, IDLE, KindMismatchError, Lesson
from trainwright.sharding.data.pace import Pace
from trainwright.sharding.data.passes import DrivenUnit, Pass, parents_of, usual_order


class GatherOrderWarning(UserWarning):
    """Ranks gather more than any one of them needs; the results are right."""


class GatherOrder:
    """Gathers units in one sequence on all ranks, whatever a rank needs of it.

    Gathers are collectives: ranks that issue them in different orders would get each other's
    weights, or wait for ever. In the first pass of a kind the ranks agree on each gather. Later
    passes follow the sequence found: a rank joins what it does not need and frees it at once.

    Args:
        units: Outer ones before those inside of them, on all ranks alike.
        agree: Joins all ranks that gather with this one.
        live_units: How many may be gathered at once for being needed now or next.
        pace: Is told of every gather.
    """

    def __init__(
        self, units: Sequence[DrivenUnit], agree: Communicator, live_units: int, pace: Pace
    ) -> None:
        self.kind: Pass | None = None
        self._units = units
        self._agree = agree
        self._pace = pace
        self._most_ahead = live_units - 1
        self._parents = parents_of(units)
        self._learned: dict[Pass, tuple[int, ...]] = {}
        self._staying: dict[Pass, set[int]] = {}
        self._never_used: set[int] = set()
        self._lesson: Lesson | None = None
        self._sequence: tuple[int, ...] = ()
        self._next = 0  # the first place of the sequence that was not gathered
        self._ahead: deque[int] = deque()  # gathered, or on their way, but not wanted yet
        self._keeps = False
        self._needed_later: set[int] = set()
        self._kept: set[int] = set()

    def begin(self, kind: Pass, *, keep: bool = False) -> None:
        """Begin a pass.

        Args:
            kind: Of the pass.
            keep: Whether what it gathers stays until `drop_kept`, on all ranks.
        """
        assert self.kind is None
        self.kind = kind
        self._pace.begin(kind)
        self._keeps = keep
        self._needed_later = set()
        self._sequence = self._learned.get(kind, ())
        self._next = 0
        if kind not in self._learned:
            forward = self._learned.get(Pass.FORWARD)
            self._lesson = Lesson(kind, self._agree, usual_order(kind, self._parents, forward))

    def want(self, index: int) -> None:
        """Let a unit's weights be here.

        Raises:
            LifecycleError: The ranks' order does not have this unit after those gathered before.

        Communicates:
            The gathers of this unit and of those before it in the order; in the first pass of a
            kind also 16 bytes a gather.
        """
        if index in self._ahead:
            while (first := self._ahead.popleft()) != index:
                self._give_back(first)
            self._take(index)
        elif self._units[index].is_gathered:
            return
        elif self._lesson is not None:
            self._learn(index)
        else:
            self._follow(index)

    def look_ahead(self) -> None:
        """Start the gathers of the next units, as many as may be live besides the current one."""
        while len(self._ahead) < self._most_ahead:
            index = next(self._upcoming(), None)
            # What is in use now has its turn when it was released.
            if index is None or index in self._ahead or self._units[index].is_gathered:
                return
            self._next += 1
            self._gather(index)
            self._ahead.append(index)

    def is_behind(self, index: int) -> bool:
        """Whether the order cannot give this unit any more in this pass."""
        if self._units[index].is_gathered or index in self._ahead:
            return False
        if self._lesson is not None:
            return index in self._lesson.mine
        return index not in self._sequence[self._next :]

    def need_later(self, index: int) -> None:
        """Say that the backward of this forward needs the unit."""
        self._needed_later.add(index)

    def free(self, index: int) -> None:
        """Release a unit, and tell it if it is not needed again in this backward."""
        unit = self._units[index]
        unit.release()
        if self.kind is not Pass.BACKWARD or self._lesson is not None or index in self._ahead:
            return
        if index not in self._sequence[self._next :]:
            unit.end_backward()

    def stays(self, index: int) -> bool:
        """Whether a unit is gathered for longer than its use, on all ranks."""
        return index in self._kept and self._units[index].is_gathered

    def end(self, *, was_run: bool) -> None:
        """End the pass: join the gathers of ranks that still run it.

        Args:
            was_run: Whether this rank computed anything in it.
        """
        kind = self.kind
        assert kind is not None
        if self._lesson is not None:
            self._learn(DONE if was_run else IDLE)
            self._remember(self._lesson)
        else:
            self._skip_to(len(self._sequence))
        self._lesson = None
        self._keeps = False
        self.kind = None

    def drop_kept(self) -> list[int]:
        """Return what passes kept; from now on it stays only as long as it is used."""
        kept = sorted(self._kept)
        self._kept.clear()
        return kept

    def forget(self) -> None:
        """Learn all orders anew."""
        self._learned.clear()
        self._staying.clear()
        self._never_used.clear()

    def _learn(self, want: int) -> None:
        lesson = self._lesson
        assert lesson is not None
        while True:
            try:
                chosen = lesson.choose(want)
            except KindMismatchError as mismatch:
                self._fail(
                    f"ranks run different passes: {mismatch}; every rank runs the same forwards "
                    "and backwards in the same order, under no_grad on all ranks or on none"
                )
            if chosen is None:
                return
            if chosen == want:
                self._gather(want)
                self._take(want)
                return
            self._join(chosen)

    def _follow(self, index: int) -> None:
        if index not in self._sequence[self._next :]:
            if self._agree.size > 1:
                self._refuse(index)
            self._gather(index)
        else:
            self._skip_to(self._sequence.index(index, self._next))
            self._next += 1
            self._gather(index)
        self._take(index)

    def _skip_to(self, place: int) -> None:
        while self._ahead:
            self._give_back(self._ahead.popleft())
        while self._next < place:
            index = self._sequence[self._next]
            self._next += 1
            if self._agree.size > 1 and not self.stays(index):
                self._join(index)

    def _upcoming(self) -> Iterator[int]:
        while self._next < len(self._sequence):
            index = self._sequence[self._next]
            if self.stays(index):
                self._next += 1
            else:
                yield index

    def _gather(self, index: int) -> None:
        self._pace.gather(index)
        self._units[index].gather()

    def _take(self, index: int) -> None:
        self._units[index].await_weights()
        if self._does_keep(index):
            self._kept.add(index)

    def _join(self, index: int) -> None:
        """Gather for the sake of others."""
        unit = self._units[index]
        if unit.is_gathered:
            # In use here, but not on every rank: the same memory gets the same weights again.
            unit.release()
            self._gather(index)
            self._take(index)
        else:
            self._gather(index)
            self._give_back(index)

    def _give_back(self, index: int) -> None:
        if self._does_keep(index):
            self._take(index)
        else:
            self.free(index)

    def _does_keep(self, index: int) -> bool:
        if not self._keeps or self.kind is None:
            return False
        return self._lesson is not None or index in self._staying[self.kind]

    def _remember(self, lesson: Lesson) -> None:
        if not lesson.was_run:
            return  # nobody ran it: nothing was learned
        kind = lesson.kind
        # A unit that a forward used and its backward did not need is not needed later either.
        unused = self._never_used
        if not kind.is_backward:
            unused = set(range(len(self._units))) - set(lesson.agreed)
        elif not lesson.was_run_by_all:
            unused = set(range(len(self._units)))  # a rank that left it out may need others
        if kind is Pass.FORWARD:
            self._never_used = unused
        sequence, fits = lesson.sequence(unused if self._agree.size > 1 else set())
        self._learned[kind] = sequence
        if self._keeps:
            needed = lesson.unite(self._needed_later, len(self._units))
            self._staying[kind] = needed | self._never_used
            # What will not stay from now on goes, so that the backward learns to gather it.
            for index in sorted(self._kept - self._staying[kind]):
                self._kept.remove(index)
                self._units[index].release()
        if not fits and self._agree.rank == 0:
            self._warn(lesson)

    def _warn(self, lesson: Lesson) -> None:
        surplus = {
            unit
            for unit in lesson.agreed
            if lesson.agreed.count(unit) > max(order.count(unit) for order in lesson.wanted)
        }
        orders: dict[str, list[str]] = {}
        for rank, order in enumerate(lesson.wanted):
            orders.setdefault(self._names(order), []).append(str(rank))
        used = "; ".join(f"rank {', '.join(ranks)}: {names}" for names, ranks in orders.items())
        warnings.warn(
            f"in a {lesson.kind} ranks use units in different orders ({used}); results are right, "
            f"but all ranks gather {self._names(sorted(surplus))} more often than any rank uses "
            "it; use units in one order on all ranks to save that",
            GatherOrderWarning,
            stacklevel=2,
        )

    def _names(self, units: Sequence[int]) -> str:
        names = [repr(self._units[unit].name) for unit in units]
        shown = names if len(names) <= 24 else [*names[:12], "…", *names[-12:]]
        return ", ".join(shown) or "nothing"

    def _refuse(self, index: int) -> NoReturn:
        self._fail(
            f"unit {self._units[index].name!r} is needed in a {self.kind} after place {self._next} "
            f"of the order that all ranks follow ({self._names(self._sequence)}), where it "
            "does not come any more; if the model's order has changed, call relearn_order() on all "
            "ranks before the step, each step if it changes each step"
        )

    def _fail(self, message: str) -> NoReturn:
        error = LifecycleError(f"rank {self._agree.rank}: {message}")
        self._agree.abort(error)
        raise error
