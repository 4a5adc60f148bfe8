"""Laws that guards, schedules, snapshots and journals keep, and strategies to draw inputs."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from hypothesis import strategies as st

from trainwright.stability_guards.guards import any_of, never
from trainwright.stability_guards.journal import Intervention, Journal
from trainwright.stability_guards.positions import Positions
from trainwright.stability_guards.protocol import Guard, Report, Verdict
from trainwright.stability_guards.ramps import BatchRamp
from trainwright.stability_guards.recovery_plan import BatchSource
from trainwright.stability_guards.schedules import Rates, WarmupSchedule
from trainwright.stability_guards.snapshots import Snapshot

GuardLaw = Callable[[Guard, Sequence[Report]], None]


def reports(max_steps: int = 12) -> st.SearchStrategy[list[Report]]:
    """Draw the reports of consecutive steps: healthy, non-finite, without tokens, voted down."""
    values = st.one_of(
        st.floats(0.0, 10.0), st.floats(0.0, 10.0), st.sampled_from([math.nan, math.inf])
    )
    report = st.builds(
        Report,
        step=st.just(0),
        loss=values,
        norm=values,
        non_finite=st.sampled_from([0, 0, 0, 3]),
        tokens=st.sampled_from([8, 8, 8, 0]),
        local_verdict=st.sampled_from([Verdict.CONTINUE] * 4 + list(Verdict)),
    )
    steps = st.lists(report, max_size=max_steps)
    return steps.map(lambda found: [attrs.evolve(r, step=i) for i, r in enumerate(found)])


def warmup_lengths() -> st.SearchStrategy[tuple[int, int]]:
    """Draw (warmup_steps, total_steps), the degenerate ones too."""
    pairs = st.tuples(st.integers(0, 20), st.integers(0, 40))
    return pairs.map(lambda pair: (pair[0], pair[0] + pair[1]))


def positions(most: int = 40) -> st.SearchStrategy[Positions]:
    """Draw sets of data positions, of spans that may touch, overlap or be empty."""
    spans = st.tuples(st.integers(0, most), st.integers(0, 6)).map(lambda p: (p[0], p[0] + p[1]))
    return st.lists(spans, max_size=6).map(Positions)


def verdicts_of(guard: Guard, history: Sequence[Report]) -> list[Verdict]:
    """Return the verdicts of a guard on consecutive steps."""
    state = guard.initial()
    verdicts = []
    for report in history:
        state, verdict = guard.update(state, report)
        verdicts.append(verdict)
    return verdicts


def law_update_is_a_pure_function(guard: Guard, history: Sequence[Report]) -> None:
    """The same state and report give the same result, and the state given stays as it was."""
    state = guard.initial()
    for report in history:
        before = copy.deepcopy(state)
        result = guard.update(state, report)
        assert state == before
        assert guard.update(before, report) == result
        state, _ = result


def law_the_state_survives_json(guard: Guard, history: Sequence[Report]) -> None:
    """A guard resumed from JSON after any step goes on as the one that was never interrupted."""
    state = guard.initial()
    for report in history:
        resumed = json.loads(json.dumps(state, allow_nan=False))
        assert resumed == state
        assert guard.update(resumed, report) == guard.update(state, report)
        state, _ = guard.update(state, report)


def law_a_reason_is_given_exactly_for_interventions(
    guard: Guard, history: Sequence[Report]
) -> None:
    """``reason`` is empty where the verdict is CONTINUE, and only there."""
    state = guard.initial()
    assert guard.reason(state) == ""
    for report in history:
        state, verdict = guard.update(state, report)
        assert bool(guard.reason(state)) == (verdict is not Verdict.CONTINUE)


def law_never_is_the_identity(guard: Guard, history: Sequence[Report]) -> None:
    """``any_of`` with ``never`` on either side, or alone, changes no verdict."""
    expected = verdicts_of(guard, history)
    for combined in (any_of(guard), any_of(guard, never()), any_of(never(), guard)):
        assert verdicts_of(combined, history) == expected


def law_any_of_takes_the_greatest_verdict(guard: Guard, history: Sequence[Report]) -> None:
    """Grouping, order and repetition of guards do not matter."""
    twice = any_of(guard, any_of(never(), guard))
    assert verdicts_of(twice, history) == verdicts_of(guard, history)


GUARD_LAWS: tuple[GuardLaw, ...] = (
    law_update_is_a_pure_function,
    law_the_state_survives_json,
    law_a_reason_is_given_exactly_for_interventions,
    law_never_is_the_identity,
    law_any_of_takes_the_greatest_verdict,
)
"""Call each with a guard and a drawn history."""


def law_every_rate_is_within_its_bounds(schedule: WarmupSchedule) -> None:
    """Rates are positive in the rise, at most the peak, and the floor after the end."""
    end = schedule.warmup_steps if schedule.total_steps is None else schedule.total_steps
    rates = [schedule(update) for update in range(end + 5)]
    assert all(0.0 <= rate <= schedule.peak for rate in rates)
    assert max(rates) == schedule.peak
    assert rates[0] > 0.0 or schedule.peak == 0.0
    assert all(rate >= schedule.floor for rate in rates[schedule.warmup_steps :])
    if schedule.total_steps is not None:
        assert set(rates[max(end, 1) :]) == {schedule.floor}


def law_a_schedule_rises_and_then_falls(schedule: WarmupSchedule) -> None:
    """Rates never fall during the rise and never rise during the fall."""
    end = schedule.warmup_steps if schedule.total_steps is None else schedule.total_steps
    rates = [schedule(update) for update in range(end + 5)]
    top = max(schedule.warmup_steps - 1, 0)
    assert rates[top] == schedule.peak
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


SCHEDULE_LAWS: tuple[Callable[[WarmupSchedule], None], ...] = (
    law_every_rate_is_within_its_bounds,
    law_a_schedule_rises_and_then_falls,
)
"""Call each with a schedule whose peak is positive."""


def law_an_update_is_a_span_of_one(schedule: Rates) -> None:
    """The rate of an update is that of the span of it alone, at most the peak, from 0."""
    for update in range(50):
        rate = schedule(update)
        assert rate == schedule.over(update, update + 1)
        assert 0.0 <= rate <= schedule.peak


def law_tokens_schedule_as_updates_do(make: Callable[[int], Rates], batch: int) -> None:
    """A schedule whose lengths are ``batch`` times as long gives batches of that size its rates.

    Args:
        make: builds the schedule with all lengths times the number given.
        batch: units of an update.
    """
    for update in range(50):
        assert make(batch).over(update * batch, (update + 1) * batch) == make(1)(update)


def law_consumption_is_the_sum_of_sizes(ramp: BatchRamp) -> None:
    """What updates have consumed is the sum of their sizes, which depend on it alone."""
    consumed = 0
    for update in range(50):
        assert ramp.consumed(update) == consumed
        assert ramp.size(update) == ramp.size_at(consumed)
        assert ramp.updates(consumed) == update
        consumed += ramp.size(update)


def law_a_snapshot_puts_everything_back(
    snapshot: Snapshot, change: Callable[[], object], read: Callable[[], Any]
) -> None:
    """Whatever changes after ``take``, ``restore`` brings back, twice, and forgets later ones.

    Args:
        snapshot: without snapshots of steps from 3.
        change: changes the state that it keeps.
        read: returns that state as values that compare, not as live objects.
    """
    before = read()
    snapshot.take(3)
    after = []
    for _ in range(2):
        change()
        after.append(read())
        snapshot.take(4)
        snapshot.restore(3)
        assert read() == before
        assert max(snapshot.steps) == 3
    assert after[0] == after[1]


def law_a_source_yields_in_order_what_is_not_left_out(
    source: BatchSource, read: Callable[[], object], start: int, left_out: Positions
) -> None:
    """After ``seek`` batches hold the next positions that are not left out, each once, in order.

    Args:
        source: the reader.
        read: reads a batch of it.
        start: where to begin.
        left_out: what to leave out.
    """
    source.seek(start, left_out)
    at = start
    for _ in range(4):
        read()
        expected, at = left_out.draw(at, source.last.count)
        assert source.last == expected
        assert source.last
        # A reader may stand before or behind what is left out; nothing else lies between.
        low, high = sorted((at, source.position))
        assert all(position in left_out for position in range(low, high))


def law_a_journal_keeps_what_was_appended(
    reopen: Callable[[], Journal], entries: Sequence[Intervention]
) -> None:
    """Whatever ``append`` has returned for is there, in order, also when it is opened again."""
    for count, entry in enumerate(entries, start=1):
        journal = reopen()
        journal.append(entry)
        assert journal.entries == tuple(entries[:count])
        assert reopen().entries == tuple(entries[:count])
