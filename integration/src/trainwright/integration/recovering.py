"""The recovery of a run: guards, snapshots and journal, put together for one training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.integration.live_state import LiveState
from trainwright.integration.parts import Parts, Progress
from trainwright.integration.settings.parallel import NVME
from trainwright.stability_guards import MemorySnapshots, Recovery, Snapshot, bytes_of


class NoSnapshots:
    """Snapshots of a run that never goes back: there are none."""

    steps: tuple[int, ...] = ()

    def take(self, step: int) -> None:
        """Keep nothing."""

    def restore(self, step: int) -> None:
        """Never be called: nothing can be restored."""
        raise AssertionError(f"step {step} was never kept")


def guards_state(recovery: Recovery, parts: Parts) -> dict[str, Any]:
    """Return what a checkpoint keeps of a recovery: its memory, and of which guards it is."""
    return {**recovery.state_dict(), "of": parts.guards.guard_name}


def describe_snapshots(parts: Parts, progress: Progress) -> str:
    """Return a line on what this rank keeps to go back to."""
    count = parts.guards.snapshots
    if not count and parts.config.parallel.offload.startswith(NVME):
        return "no snapshots to go back to: they would copy to memory what a file keeps"
    if not count:
        return "no snapshots to go back to"
    held = count * bytes_of(LiveState(parts, progress).state_dict())
    return (
        f"{count} snapshots to go back to, every {parts.guards.recovery.snapshot_every} steps: "
        f"{held:,} bytes of this rank's host memory"
    )


def recovery_of(parts: Parts, progress: Progress) -> Recovery:
    """Return what judges the steps of a loop and goes back; ``progress`` moves with it.

    Guards that are not those whose memory ``progress`` holds begin anew.

    Raises:
        AbandonedStateError: ``progress`` is of training that a rollback has taken back.
    """
    plan = parts.guards
    snapshots: Snapshot = NoSnapshots()
    if plan.snapshots:
        snapshots = MemorySnapshots(
            {"run": LiveState(parts, progress)},
            keep=plan.snapshots,
            budget_bytes=plan.snapshot_bytes,
            communicator=parts.mesh.world,
        )
    recovery = Recovery(
        plan.guard, snapshots, parts.feed, parts.journal, plan.recovery, plan.exclude
    )
    if progress.guard_state:
        state = dict(progress.guard_state)
        if state.pop("of", None) != plan.guard_name:
            anew = plan.guard.initial()
            state["guard"] = anew
            marks = state.get("marks")
            # What is none is left as it is, for the recovery to refuse.
            if isinstance(marks, Mapping) and all(isinstance(m, Mapping) for m in marks.values()):
                state["marks"] = {step: {**mark, "guard": anew} for step, mark in marks.items()}
        recovery.load_state_dict(state)
    return recovery
