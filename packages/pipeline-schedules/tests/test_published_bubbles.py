"""Bubble rates, bubbles and steps come out as they are printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.pipeline_schedules import (
    Action,
    Costs,
    Kind,
    ScheduleError,
    dualpipe_v,
    interleaved_1f1b,
    one_f_one_b,
    peak_memory,
    simulate,
    zb_h1,
    zb_h2,
)

SETTINGS = json.loads((Path(__file__).parent / "published_bubble_rates.json").read_text())[
    "settings"
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s['model']}-m{s['microbatches']}")
def test_bubble_rates_of_the_zero_bubble_paper_come_out_to_four_decimals(
    setting: dict[str, Any],
) -> None:
    p, m, chunks = setting["ranks"], setting["microbatches"], setting["chunks"]
    *stage, hop = setting["microseconds"]
    costs, of_chunk = Costs(*stage, latency=hop), [time / chunks for time in stage]
    looped = simulate(
        interleaved_1f1b(p, m, chunks), Costs(*of_chunk, latency=hop), loops_wait_once=True
    )
    rates = {
        "1F1B": simulate(one_f_one_b(p, m), costs).bubble_fraction,
        "1F1B-I": looped.bubble_fraction,
        "ZB-H1": simulate(zb_h1(p, m), costs).bubble_fraction,
        "ZB-H2": simulate(zb_h2(p, m), costs).span_bubble_fraction,
    }
    assert {name: round(rate, 4) for name, rate in rates.items()} == setting["rates"]


def test_waiting_for_every_microbatch_where_a_loop_closes_takes_longer_than_the_paper_says() -> (
    None
):
    schedule, costs = interleaved_1f1b(4, 8, 2), Costs(2, 2, 2, latency=1)
    printed = simulate(schedule, costs, loops_wait_once=True)
    assert simulate(schedule, costs).makespan > printed.makespan
    assert simulate(one_f_one_b(1, 3), loops_wait_once=True) == simulate(one_f_one_b(1, 3))
    with pytest.raises(ScheduleError, match="4 ranks do not divide 6 microbatches"):
        simulate(interleaved_1f1b(4, 6, 2), loops_wait_once=True)


# deepseek-ai/DualPipe, README.md: bubbles with B the whole backward, for PP stages.
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize(("f", "w", "overlapped"), [(4, 4, 12), (4, 2, 10), (3, 3, 7), (3, 2, 6)])
def test_bubbles_of_the_dualpipe_readme_come_out(
    stages: int, f: int, w: int, overlapped: int
) -> None:
    m, b = 2 * stages + 2, f + w
    costs = Costs(f, f, w, pair=overlapped)
    assert max(simulate(one_f_one_b(stages, m), costs).idle) == (stages - 1) * (f + b)
    assert max(simulate(zb_h1(stages, m), costs).idle) == (stages - 1) * (f + b - 2 * w)
    schedule = dualpipe_v(stages // 2, m)
    # Half the ranks hold two stages each; the one at the tip of the V idles most.
    of_tip = simulate(schedule, costs).idle[-1]
    assert of_tip == (stages / 2 - 1) * (overlapped + b - 3 * w)
    assert of_tip == max(simulate(schedule, costs).idle)
    assert peak_memory(schedule).max() == stages + 1


# The steps of dualpipe.py for 8 ranks and 20 microbatches, in its order: F0, F0F1, B1W1F1,
# F0B1F1B0, B1F1B0, B1B0, WB0. Ranks r and 7 - r do together what rank r of a V of 4 does for 10.
STEPS = {
    0: (6, 1, 3, 3, 3, 1, 3),
    1: (4, 2, 2, 4, 2, 2, 2),
    2: (2, 3, 1, 5, 1, 3, 1),
    3: (0, 4, 0, 6, 0, 4, 0),
}
CYCLES = ("F0", "F0 F1", "B1 W1 F1", "F0 B1 F1 B0", "B1 F1 B0", "B1 B0", "W B0")


@pytest.mark.parametrize("rank", STEPS)
def test_dualpipe_v_takes_the_steps_that_deepseeks_program_takes(rank: int) -> None:
    schedule = dualpipe_v(4, 10)
    chunk = {stage: number for number, stage in enumerate(schedule.stages_of(rank))}
    word_of_kind = {Kind.F_PAIRED: "F", Kind.I: "B"}

    def word(action: Action) -> str:
        return f"{word_of_kind.get(action.kind, action.kind.name)}{chunk[action.stage]}"

    steps = zip(CYCLES, STEPS[rank], strict=True)
    expected = [word for cycle, times in steps for word in cycle.split() * times]
    expected += ["W"] * (rank + 1)
    program = [word(action) for action in schedule.program(rank)]
    assert len(program) == len(expected)
    # Weight gradients that fill the end are of whichever chunk waits longest.
    assert all(done.startswith(step) for done, step in zip(program, expected, strict=True))
