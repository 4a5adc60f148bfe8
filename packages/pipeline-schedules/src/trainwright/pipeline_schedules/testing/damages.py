"""Small damages to a schedule, most of which break it and some of which do not."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st

from trainwright.pipeline_schedules.actions import COMPUTE_KINDS, STAGE_KINDS, Action, Kind
from trainwright.pipeline_schedules.schedule import Schedule

_Programs = list[list[Action]]


@st.composite
def damages(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """The schedule after one drop, duplicate, swap, retarget, move or jostle."""
    programs = [list(schedule.program(rank)) for rank in range(schedule.num_ranks)]
    # Jostling comes up more often: only it reaches deadlocks between ranks that are in order.
    kinds = (_jostle, _drop, _jostle, _duplicate, _jostle, _swap, _retarget, _move, _move_far)
    damage = draw(st.sampled_from(kinds))
    damage(draw, programs, schedule)
    return attrs.evolve(schedule, actions=programs)


def _place(draw: st.DrawFn, programs: _Programs) -> tuple[list[Action], int]:
    program = draw(st.sampled_from([program for program in programs if program]))
    return program, draw(st.integers(0, len(program) - 1))


def _drop(draw: st.DrawFn, programs: _Programs, schedule: Schedule) -> None:
    program, index = _place(draw, programs)
    del program[index]


def _duplicate(draw: st.DrawFn, programs: _Programs, schedule: Schedule) -> None:
    program, index = _place(draw, programs)
    program.insert(draw(st.integers(0, len(program))), program[index])


def _swap(draw: st.DrawFn, programs: _Programs, schedule: Schedule) -> None:
    program, index = _place(draw, programs)
    other = draw(st.integers(0, len(program) - 1))
    program[index], program[other] = program[other], program[index]


def _move(draw: st.DrawFn, programs: _Programs, schedule: Schedule) -> None:
    program, index = _place(draw, programs)
    action = program.pop(index)
    program.insert(draw(st.integers(0, len(program))), action)


def _move_far(draw: st.DrawFn, programs: _Programs, schedule: Schedule) -> None:
    """Move an action to another rank, which does not own its stage, or within its own."""
    program, index = _place(draw, programs)
    action = program.pop(index)
    target = draw(st.sampled_from(programs))
    target.insert(draw(st.integers(0, len(target))), action)


def _retarget(draw: st.DrawFn, programs: _Programs, schedule: Schedule) -> None:
    """Give an action another stage, microbatch or kind, perhaps none that exists."""
    program, index = _place(draw, programs)
    action = program[index]
    what = draw(st.sampled_from(("stage", "microbatch", "kind")))
    if what == "stage":
        program[index] = attrs.evolve(action, stage=draw(st.integers(0, schedule.num_stages)))
    elif what == "microbatch" and action.kind not in STAGE_KINDS:
        number = draw(st.integers(0, schedule.num_microbatches))
        program[index] = attrs.evolve(action, microbatch=number)
    elif action.kind in COMPUTE_KINDS:
        overlaps = (schedule.packed[:, 0] == Kind.F_PAIRED).any()
        kinds = [kind for kind in COMPUTE_KINDS if overlaps or kind != Kind.F_PAIRED]
        program[index] = attrs.evolve(action, kind=draw(st.sampled_from(kinds)))


def _jostle(draw: st.DrawFn, programs: _Programs, schedule: Schedule) -> None:
    """Let actions of different microbatches or stages pass each other, on several ranks."""
    for _ in range(draw(st.integers(1, 12))):
        program, index = _place(draw, programs)
        for place in range(index, min(index + draw(st.integers(1, 3)), len(program) - 1)):
            one, other = program[place : place + 2]
            if (one.stage, one.microbatch) != (other.stage, other.microbatch):
                program[place : place + 2] = [other, one]
