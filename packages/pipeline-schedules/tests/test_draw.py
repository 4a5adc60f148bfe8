"""Drawings show every action where it runs."""

from __future__ import annotations

import re

import pytest
from hypothesis import given

from trainwright.pipeline_schedules import (
    Action,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    Simulation,
    draw,
    forward_only,
    gpipe,
    one_f_one_b,
    simulate,
)
from trainwright.pipeline_schedules.testing import valid_schedules


def test_1f1b_is_drawn_as_in_the_papers() -> None:
    assert draw(one_f_one_b(3, 3)) == (
        "1f1b: 3 stages on 3 ranks, 3 microbatches, makespan 15, bubble 66.7% over ideal\n"
        "rank 0 | F0 F1 F2 .  .  .  .  B0 =  .  B1 =  .  B2 =\n"
        "rank 1 | .  F0 F1 .  .  B0 =  F2 B1 =  .  B2 =  .  .\n"
        "rank 2 | .  .  F0 B0 =  F1 B1 =  F2 B2 =  .  .  .  .\n"
        "F forward, B backward; the number is the microbatch; = goes on, . idle; a column is 1"
    )


@given(schedule=valid_schedules())
def test_every_action_is_drawn_once_on_the_line_of_its_rank(schedule: Schedule) -> None:
    lines = draw(schedule, max_columns=10_000).splitlines()
    several = len(set(schedule.rank_of_stage)) < schedule.num_stages
    for rank in range(schedule.num_ranks):
        words = re.findall(r"\d*[FBIW]\d+", lines[1 + rank].split("|")[1])
        program = schedule.program(rank)
        names = [str(a) if several else f"{a.kind.name}{a.microbatch}" for a in program]
        assert words == names


def test_columns_that_are_not_shown_take_no_memory() -> None:
    lines = draw(simulate(gpipe(2, 1), Costs(forward=1e-9, backward=1e9))).splitlines()
    assert lines[1].startswith("rank 0 | F0 .  .  .")
    assert lines[2].startswith("rank 1 | .  F0 B0 =  =")
    assert len(lines[2].split("|")[1].split()) == 200
    assert int(lines[-1].split()[0]) > 10**15


def test_stages_are_named_where_a_rank_has_several() -> None:
    program = [Action(Kind.F, 0, 0), Action(Kind.F, 1, 0), Action(Kind.B, 1, 0)]
    schedule = Schedule([[*program, Action(Kind.B, 0, 0)]], [0, 0], 1, "two in one")
    lines = draw(schedule).splitlines()
    assert lines[1] == "rank 0 | 0F0 1F0 1B0 =   0B0 ="
    assert "the stage stands before the letter" in lines[2]


def test_columns_are_as_wide_as_asked_or_as_the_shortest_action() -> None:
    run = simulate(gpipe(2, 1), Costs(forward=0.5, backward=1.5))
    assert draw(run).splitlines()[1:3] == [
        "rank 0 | F0 .  .  .  .  B0 =  =",
        "rank 1 | .  F0 B0 =  =  .  .  .",
    ]
    assert draw(run, unit=0.25).splitlines()[2].startswith("rank 1 | .  .  F0 =  B0 =  =")


def test_what_is_cut_off_or_too_short_to_show_is_said() -> None:
    cut = draw(one_f_one_b(2, 4), max_columns=5)
    assert cut.splitlines()[1] == "rank 0 | F0 F1 .  .  B0"
    assert cut.endswith("10 more columns are not shown")
    coarse = draw(one_f_one_b(1, 4), unit=6)
    assert "actions shorter than a column are not shown" in coarse


def test_actions_that_start_half_a_column_late_keep_a_column_each() -> None:
    run = Simulation(forward_only(1, 3), [0, 1.5, 2.5], [1, 2.5, 3.5])
    assert draw(run).splitlines()[1] == "rank 0 | F0 .  F1 F2"


def test_ten_ranks_and_more_stay_aligned() -> None:
    lines = draw(gpipe(11, 1)).splitlines()[1:12]
    assert {line.index("|") for line in lines} == {8}


@pytest.mark.parametrize("unit", [0, -1, float("nan"), float("inf")])
def test_a_unit_that_is_no_time_is_refused(unit: float) -> None:
    with pytest.raises(ScheduleError, match="unit must be positive"):
        draw(gpipe(1, 1), unit=unit)


def test_a_width_below_one_is_refused() -> None:
    with pytest.raises(ScheduleError, match="max_columns must be at least 1, got 0"):
        draw(gpipe(1, 1), max_columns=0)
