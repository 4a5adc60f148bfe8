"""Times do not depend on the way in which they are found, and large schedules stay cheap."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainwright.pipeline_schedules import (
    Schedule,
    lower,
    one_f_one_b,
    sequential,
    simulate,
    verify,
)
from trainwright.pipeline_schedules.dependencies import Stuck, _in_rounds, _one_by_one, waits
from trainwright.pipeline_schedules.testing import damages, valid_schedules


@given(schedule=valid_schedules(), seed=st.integers(0, 2**32 - 1), latency=st.sampled_from((0, 2)))
def test_rounds_over_all_ranks_and_a_loop_over_one_after_the_other_find_the_same_times(
    schedule: Schedule, seed: int, latency: int
) -> None:
    durations = np.random.default_rng(seed).integers(0, 9, schedule.num_actions).astype(float)
    needed = waits(schedule, float(latency))
    rounds = _in_rounds(schedule.offsets, durations, needed)
    loop = _one_by_one(schedule.offsets, durations, needed)
    assert np.array_equal(rounds, loop)  # type: ignore[arg-type]


@given(schedule=valid_schedules(max_chunks=1), data=st.data())
def test_both_get_stuck_at_the_same_place(schedule: Schedule, data: st.DataObject) -> None:
    damaged = data.draw(damages(schedule))
    inside = (damaged.packed[:, 1:] < [damaged.num_stages, damaged.num_microbatches]).all()
    if not inside:
        return
    durations = np.ones(damaged.num_actions)
    needed = waits(damaged)
    outcomes = [run(damaged.offsets, durations, needed) for run in (_in_rounds, _one_by_one)]
    assert isinstance(outcomes[0], Stuck) == isinstance(outcomes[1], Stuck)
    if isinstance(outcomes[0], Stuck) and isinstance(outcomes[1], Stuck):
        assert outcomes[0].rows.tolist() == outcomes[1].rows.tolist()


def test_wide_pipelines_obey_the_closed_forms_too() -> None:
    schedule = one_f_one_b(64, 128)
    assert simulate(schedule).makespan == 3 * (128 + 63)
    verify(lower(one_f_one_b(40, 10)))
    assert simulate(sequential(40, 2)).makespan == 3 * 2 * 40
