"""What guards remember begins and ends at the step that is said, and comes back from a state."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
import torch

from trainwright.collectives import Communicator, LocalWorld
from trainwright.stability_guards import (
    Guard,
    MemoryJournal,
    MemorySnapshots,
    NonFiniteGuard,
    Positions,
    Recovery,
    Report,
    SpikeGuard,
    Verdict,
    compare_replicas,
    escalate,
)

CONTINUE, SKIP, ROLLBACK = Verdict.CONTINUE, Verdict.SKIP, Verdict.ROLLBACK
CALM = [1.0, 1.1] * 16


def _verdicts(guard: Guard, losses: Sequence[float]) -> list[Verdict]:
    state, found = guard.initial(), []
    for step, loss in enumerate(losses):
        state, verdict = guard.update(state, Report(step, loss=loss, norm=1.0))
        found.append(verdict)
    return found


@pytest.mark.parametrize(("history", "window"), [(8, 16), (16, 8)])
def test_the_first_value_after_as_many_as_a_guard_needs_is_judged(
    history: int, window: int
) -> None:
    guard = SpikeGuard("loss", min_history=history, window=window)
    enough = min(history, window)

    late = _verdicts(guard, [*CALM[:enough], 1e3])
    early = _verdicts(guard, [*CALM[: enough - 1], 1e3])

    assert (early[-1], late[-1]) == (CONTINUE, SKIP)


def test_a_spike_is_judged_by_the_values_before_it() -> None:
    guard = SpikeGuard("loss", threshold=12.0, min_history=4, window=4)

    # 12.3 spreads, (1.4 - 1.0) / 1.349 each, above 1.4; of the next four values, itself among them,
    # the middle would be 1.6, and the spike 11.6 spreads above it.
    assert _verdicts(guard, [1.0, 1.2, 1.4, 1.6, 5.05])[-1] is SKIP


@pytest.mark.parametrize(("calm", "second"), [(1, ROLLBACK), (2, SKIP), (3, SKIP)])
def test_an_alarm_is_forgotten_after_the_steps_that_count(calm: int, second: Verdict) -> None:
    guard = escalate(NonFiniteGuard(100), skips=1, rollbacks=1, within_steps=3)

    verdicts = _verdicts(guard, [math.nan, *[1.0] * calm, math.nan])

    assert [verdict for verdict in verdicts if verdict is not CONTINUE] == [SKIP, second]


class Nothing:
    """Has no state, and reads nothing."""

    position = 0
    last = Positions()

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert not state

    def seek(self, position: int, left_out: Positions) -> None:
        self.position = position


def test_what_a_guard_has_learnt_comes_back_from_the_state_of_a_recovery() -> None:
    def begun() -> Recovery:
        guard = SpikeGuard("loss", min_history=8, window=16)
        snapshots = MemorySnapshots({"nothing": Nothing()})
        return Recovery(guard, snapshots, Nothing(), MemoryJournal())

    learnt, fresh, resumed = begun(), begun(), begun()
    for step, loss in enumerate(CALM):
        learnt.judge(Report(step, loss=loss, norm=1.0), step)
    resumed.load_state_dict(json.loads(json.dumps(learnt.state_dict())))

    spike = Report(len(CALM), loss=1e3, norm=1.0)

    assert fresh.judge(spike, 0) is CONTINUE
    assert resumed.judge(spike, len(CALM)) is SKIP


def test_replicas_whose_tensors_have_changed_places_are_found() -> None:
    def run(comm: Communicator) -> list[tuple[str, tuple[int, ...]]]:
        first, second = torch.arange(6.0), torch.ones(6)
        if comm.rank == 1:
            first, second = second, first
        found = compare_replicas({"first": first, "second": second}, comm)
        return [(each.name, each.ranks) for each in found]

    assert LocalWorld(3).run(run) == [[("first", (1,)), ("second", (1,))]] * 3
