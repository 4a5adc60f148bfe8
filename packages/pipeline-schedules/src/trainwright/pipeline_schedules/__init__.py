"""Pipeline schedules as verified, simulated, drawn and executed data."""

from trainwright.pipeline_schedules.actions import NO_MICROBATCH, Action, Kind
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.generate import (
    forward_only,
    gpipe,
    one_f_one_b,
    sequential,
)
from trainwright.pipeline_schedules.lowering import lower
from trainwright.pipeline_schedules.memory import Memory, peak_activations, peak_memory
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.verify import verify

__all__ = [
    "NO_MICROBATCH",
    "Action",
    "Kind",
    "Memory",
    "Schedule",
    "ScheduleError",
    "forward_only",
    "gpipe",
    "lower",
    "one_f_one_b",
    "peak_activations",
    "peak_memory",
    "sequential",
    "verify",
]
