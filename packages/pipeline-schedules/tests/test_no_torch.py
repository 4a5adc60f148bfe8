"""The planning half lives without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import trainwright.pipeline_schedules

SOURCE = Path(trainwright.pipeline_schedules.__file__).parents[2]

USE_EVERYTHING = """
import sys

if {block}:
    sys.modules["torch"] = None
    sys.modules["trainwright.collectives"] = None

import trainwright.pipeline_schedules as schedules

schedule = schedules.lower(schedules.one_f_one_b(3, 4))
schedules.verify(schedule)
sharded = schedules.lower(schedules.gpipe(2, 2), schedules.WeightPlan(keep=0))
schedules.draw(schedules.simulate(sharded, schedules.Costs(gather=1)))
schedules.draw(schedules.simulate(schedule))
schedules.from_csv(schedules.to_csv(schedule))
schedules.svg(schedule)
schedules.trace(schedule)
schedules.search(schedules.v_shape(2), 4, budget=1000)

from trainwright.pipeline_schedules.command import main

assert main(["compare", "--stages", "2", "--microbatches", "3"]) == 0
schedules.split_layers(4, 3)
loaded = sorted(name for name, module in sys.modules.items() if module is not None)
assert not any(name.split(".")[0] == "torch" for name in loaded), loaded
assert "trainwright.collectives" not in loaded, loaded
"""


def run(block: bool) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(SOURCE), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", USE_EVERYTHING.format(block=block)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_importing_and_using_the_planning_half_does_not_import_torch() -> None:
    result = run(block=False)
    assert result.returncode == 0, result.stderr


def test_the_planning_half_works_where_torch_cannot_be_imported() -> None:
    result = run(block=True)
    assert result.returncode == 0, result.stderr
