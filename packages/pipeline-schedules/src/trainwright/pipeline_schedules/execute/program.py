"""From one rank's row of a schedule to the instructions that the executor runs."""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Mapping, Sequence

import attrs
import numpy as np

from trainwright.pipeline_schedules.actions import NO_MICROBATCH, WEIGHT_KINDS, Action, Kind
from trainwright.pipeline_schedules.execute.protocol import Reducer, WeightKeeper
from trainwright.pipeline_schedules.lowering import lower
from trainwright.pipeline_schedules.schedule import Rows, Schedule
from trainwright.pipeline_schedules.weight_plan import WeightPlan
from trainwright.pipeline_schedules.weight_traffic import peak_live, weight_traffic


class Operation(enum.Enum):
    """What an instruction does."""

    EXPECT_INPUT = "RECV_F"
    AWAIT_INPUT = "wait for input"
    FORWARD = "F"
    SEND_OUTPUT = "SEND_F"
    EXPECT_GRADIENT = "RECV_B"
    AWAIT_GRADIENT = "wait for gradient"
    LAST_BACKWARD = "last backward"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_GRADIENT = "SEND_B"
    REDUCE = "REDUCE"
    GATHER = "GATHER"
    AWAIT_WEIGHTS = "wait for weights"
    RELEASE = "RELEASE"


@attrs.frozen(eq=False)
class Instruction:
    """One thing to do, for one stage and microbatch.

    ``label`` is how profilers show it; it is made once, so that running costs no formatting.
    """

    operation: Operation
    stage: int
    microbatch: int
    label: str


@attrs.frozen(eq=False)
class Program:
    """Instructions of one rank.

    ``peak_in_flight`` is how many microbatches wait for gradients at its peak, ``split`` the stages
    and microbatches whose backward is an I and a W.
    """

    instructions: tuple[Instruction, ...]
    peak_in_flight: int
    split: frozenset[tuple[int, int]]


_OPERATION_OF_KIND = {
    Kind.F: Operation.FORWARD,
    Kind.F_PAIRED: Operation.FORWARD,
    Kind.B: Operation.BACKWARD,
    Kind.I: Operation.INPUT_GRADIENT,
    Kind.W: Operation.WEIGHT_GRADIENT,
    Kind.SEND_F: Operation.SEND_OUTPUT,
    Kind.RECV_F: Operation.EXPECT_INPUT,
    Kind.SEND_B: Operation.SEND_GRADIENT,
    Kind.RECV_B: Operation.EXPECT_GRADIENT,
    Kind.REDUCE: Operation.REDUCE,
    Kind.GATHER: Operation.GATHER,
    Kind.RELEASE: Operation.RELEASE,
}
_COMPUTATIONS = (Kind.F, Kind.B, Kind.I, Kind.W)
_ANSWERING = (Kind.F, Kind.B, Kind.I)
_COMPLETING = (Kind.B, Kind.W)
_BACKWARDS = (Kind.B, Kind.I)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_MESSAGES = (Kind.SEND_F, Kind.SEND_B, *_RECEIVES)
_STAYS = (Kind.GATHER, Kind.RELEASE)
_AHEAD = 2
"""Computations, W aside, ahead of which a receive is started.

Gloo sends once it knows of the receive: with one alone the sender is often first, and then its
message waits for two threads to wake.
"""


def compile_program(
    schedule: Schedule,
    rank: int,
    reducers: Mapping[int, Reducer],
    weights: Mapping[int, WeightKeeper],
    receive_ahead: bool,
) -> Program:
    """Turn a lowered schedule's list for one rank into instructions.

    Receives are started earlier than the list says, so that transfers overlap with computation:
    before the two computations, W aside, that stand in front of them. Where ``receive_ahead`` is
    False, that is one of any kind, and a receive never passes another message, so that transports
    that pair messages by order alone see the proven order. Gathers are waited for by the first
    computation that needs them. A forward of an overlapped pair is one like any other, and the
    backward below it comes after.
    """
    listed = [_unpaired(action) for action in schedule.program(rank)]
    actions = _start_receives_early(listed, receive_ahead)
    last_backwards, reductions = _reductions(actions, reducers)
    expected = {(action.kind, action.stage, action.microbatch) for action in actions}
    keeping = _Keeping(weights)
    instructions: list[Instruction] = []
    for number, action in enumerate(actions):
        key = (action.stage, action.microbatch)
        if action.kind is Kind.REDUCE and number not in reductions:
            continue
        if action.kind in _STAYS and not keeping.changes(action):
            continue
        if action.kind is Kind.F and (Kind.RECV_F, *key) in expected:
            instructions.append(_instruction(Operation.AWAIT_INPUT, *key))
        if action.kind in _BACKWARDS and (Kind.RECV_B, *key) in expected:
            instructions.append(_instruction(Operation.AWAIT_GRADIENT, *key))
        if action.kind in WEIGHT_KINDS and keeping.must_wait(action.stage):
            instructions.append(_instruction(Operation.AWAIT_WEIGHTS, *key))
        if number in last_backwards:
            instructions.append(_instruction(Operation.LAST_BACKWARD, *key))
        instructions.append(_instruction(_OPERATION_OF_KIND[action.kind], *key))
    split = frozenset((a.stage, a.microbatch) for a in actions if a.kind is Kind.I)
    return Program(tuple(instructions), _peak_in_flight(actions), split)


def _unpaired(action: Action) -> Action:
    return attrs.evolve(action, kind=Kind.F) if action.kind is Kind.F_PAIRED else action


class _Keeping:
    """Which keepers are gathered: one may serve several stages, and then counts them."""

    def __init__(self, weights: Mapping[int, WeightKeeper]) -> None:
        self._weights = weights
        self._stages: dict[int, int] = dict.fromkeys(map(id, weights.values()), 0)
        self._started: set[int] = set()

    def changes(self, action: Action) -> bool:
        """Whether this GATHER is its keeper's first, or this RELEASE its last."""
        keeper = id(self._weights[action.stage])
        if action.kind is Kind.GATHER:
            self._stages[keeper] += 1
            if self._stages[keeper] > 1:
                return False
            self._started.add(keeper)
            return True
        self._stages[keeper] -= 1
        return self._stages[keeper] == 0

    def must_wait(self, stage: int) -> bool:
        """Whether a computation is the first that needs what was gathered."""
        keeper = id(self._weights.get(stage))
        started = keeper in self._started
        self._started.discard(keeper)
        return started


def forward_schedule(schedule: Schedule, rank: int, num_microbatches: int) -> Schedule:
    """Forwards alone, lowered, with the stages where another lowered schedule has them.

    Rounds of as many microbatches as there are ranks; in a round, each rank runs its stages in
    order, each with all microbatches of the round, so that several chunks a rank still overlap.
    What the other schedule gathers is gathered here, as much of it at once as ``rank`` has there.
    """
    width = schedule.num_ranks
    rounds = -(-num_microbatches // width)
    microbatches = np.arange(rounds * width).reshape(rounds, 1, width)
    actions: list[Rows] = []
    for owner in range(width):
        stages = np.array(schedule.stages_of(owner), dtype=np.int64).reshape(1, -1, 1)
        columns = np.broadcast_arrays(int(Kind.F), stages, microbatches)
        rows = np.stack(columns, axis=-1).reshape(-1, 3)
        actions.append(rows[rows[:, 2] < num_microbatches].astype(np.int32))
    ranks = schedule.rank_of_stage
    forwards = Schedule(actions, ranks, num_microbatches, "forward-only", forward_only=True)
    keep = max(1, int(peak_live(schedule)[rank]))
    return lower(forwards, WeightPlan(stages=gathered_stages(schedule), keep=keep))


def gathered_stages(schedule: Schedule) -> tuple[int, ...]:
    """The stages of a lowered schedule that are gathered."""
    traffic = weight_traffic(schedule)
    return tuple(stage for stage, moved in enumerate(traffic) if moved.gathers)


def _instruction(operation: Operation, stage: int, microbatch: int) -> Instruction:
    where = "" if microbatch == NO_MICROBATCH else f" microbatch {microbatch}"
    label = f"pipeline: {operation.value} stage {stage}{where}"
    return Instruction(operation, stage, microbatch, label)


def _start_receives_early(actions: Sequence[Action], receive_ahead: bool) -> list[Action]:
    early: list[Action] = []
    ahead, counted = (_AHEAD, _ANSWERING) if receive_ahead else (1, _COMPUTATIONS)
    places: list[int] = []  # where the latest computations stand in ``early``
    for action in actions:
        place = len(early)
        if action.kind in counted:
            places = [*places, place][-ahead:]
            early.append(action)
            continue
        if action.kind in _RECEIVES:
            place = _earliest(action, early, places, receive_ahead)
        early.insert(place, action)
        places = [other + (other >= place) for other in places]
    return early


def _earliest(
    receive: Action, early: Sequence[Action], places: Sequence[int], receive_ahead: bool
) -> int:
    """Where a receive may stand at the earliest, of the end and the places of computations."""
    earliest = len(early)
    for place in reversed(places):
        # The sizes of a gradient are those of the output, known only after its forward.
        own = early[place] == Action(Kind.F, receive.stage, receive.microbatch)
        passes = any(passed.kind in _MESSAGES for passed in early[place:])
        if own or (passes and not receive_ahead):
            break
        earliest = place
    return earliest


def _reductions(
    actions: Sequence[Action], reducers: Mapping[int, Reducer]
) -> tuple[set[int], set[int]]:
    """Where backwards (B or W) stand that complete gradients, and where the reductions of these.

    One reducer may serve several stages: their last reductions count once, after all of them, so
    do the last but one of each, and so on.
    """
    numbers: dict[int, list[int]] = {}
    for number, action in enumerate(actions):
        if action.kind is Kind.REDUCE and action.stage in reducers:
            numbers.setdefault(action.stage, []).append(number)
    places: dict[int, dict[int, int]] = {}  # for each reducer, by the number counted from the last
    for stage, own in numbers.items():
        latest = places.setdefault(id(reducers[stage]), {})
        for from_last, number in enumerate(reversed(own)):
            latest[from_last] = max(number, latest.get(from_last, number))
    last_backwards: set[int] = set()
    reductions: set[int] = set()
    for reducer, latest in places.items():
        stages = {stage for stage in numbers if id(reducers[stage]) == reducer}
        for place in latest.values():
            reductions.add(place)
            last_backwards.add(_last_backward_before(actions, place, stages))
    return last_backwards, reductions


def _last_backward_before(actions: Sequence[Action], place: int, stages: Container[int]) -> int:
    before = reversed(range(place))
    return next(n for n in before if actions[n].kind in _COMPLETING and actions[n].stage in stages)


def _peak_in_flight(actions: Iterable[Action]) -> int:
    held = 0
    peak = 0
    for action in actions:
        held += (action.kind is Kind.F) - (action.kind in _BACKWARDS)
        peak = max(peak, held)
    return peak
