"""The law's step test on runs that are resumed: saved in one layout, gone on with in another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts import RankSteps, join_steps, load_snapshot, observe_gradients, step_from
from tests.serial import settings, text
from tests.serial_runs import serial_steps
from tests.test_law import assert_same_step, shape_of
from trainwright.checkpointing.state import StateStore
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.parts import Parts, assemble
from trainwright.integration.training_state import restore_state, save_state

STEP = 20
PAIRS = [
    (
        {"layout": "dp=2,tp=3", "zero": 1, "microbatches": 2},
        {"layout": "pp=4", "microbatches": 4, "schedule": "zb-v"},
    ),
    (
        {"layout": "dp=2,pp=2", "zero": 3, "microbatches": 3, "model": "tiny-tied"},
        {"layout": "tp=2,pp=3", "microbatches": 2, "model": "tiny-tied"},
    ),
    (
        {"layout": "dp=4,dp_shard=2", "zero": 2, "microbatches": 2},
        {"layout": "dp=3,tp=2", "zero": 3, "microbatches": 2, "sequence_parallel": True},
    ),
    (
        {"layout": "dp=2,tp=2,ep=2", "zero": 3, "microbatches": 2, "model": "tiny-moe"},
        {"layout": "dp=2,cp=2,pp=2,ep=4", "zero": 1, "microbatches": 3, "model": "tiny-moe"},
    ),
]


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.long)])
@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda c: c["layout"])
def test_the_step_after_a_resume_in_another_layout_is_the_serial_step(
    before: dict[str, object], after: dict[str, object], dtype: str
) -> None:
    saved, resumed = settings(dtype=dtype, **before), settings(dtype=dtype, **after)
    shape = shape_of(resumed)
    snapshot, expected = serial_steps(dtype, shape)[STEP]
    files = CrashingFiles()

    def save(comm: Communicator) -> None:
        parts = assemble(saved, comm, text(), shape)
        progress = load_snapshot(parts, snapshot)
        save_state(_store(parts, files), parts, progress)

    def go_on(comm: Communicator) -> RankSteps:
        parts = assemble(resumed, comm, text(), shape)
        gradients = observe_gradients(parts)
        progress = restore_state(_store(parts, files), parts)
        assert progress is not None
        return [step_from(parts, gradients, progress)]

    LocalWorld(saved.parallel.mesh.world_size, timeout_s=60.0).run(save)
    ranks = LocalWorld(resumed.parallel.mesh.world_size, timeout_s=60.0).run(go_on)

    assert_same_step(resumed, join_steps(ranks)[0], snapshot, expected)


def _store(parts: Parts, files: CrashingFiles) -> StateStore:
    mesh = parts.mesh
    return StateStore(Path("/run"), mesh.world, coordinates=mesh.coordinates, files=files)
