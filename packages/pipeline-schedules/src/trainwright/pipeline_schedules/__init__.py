"""Pipeline schedules as verified, simulated, drawn and executed data; the planning half."""

from trainwright.pipeline_schedules.actions import NO_MICROBATCH, Action, Kind
from trainwright.pipeline_schedules.draw import draw
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.generate import (
    forward_only,
    gpipe,
    one_f_one_b,
    sequential,
)
from trainwright.pipeline_schedules.layers import split_layers
from trainwright.pipeline_schedules.lowering import lower
from trainwright.pipeline_schedules.memory import Memory, peak_activations, peak_memory
from trainwright.pipeline_schedules.notation import action_letters, to_csv
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.simulate import Costs, Simulation, simulate
from trainwright.pipeline_schedules.verify import verify
from trainwright.pipeline_schedules.weight_plan import WeightPlan
from trainwright.pipeline_schedules.weight_traffic import WeightTraffic, peak_live, weight_traffic

__all__ = [
    "NO_MICROBATCH",
    "Action",
    "Costs",
    "Kind",
    "Memory",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "WeightPlan",
    "WeightTraffic",
    "action_letters",
    "draw",
    "forward_only",
    "gpipe",
    "lower",
    "one_f_one_b",
    "peak_activations",
    "peak_live",
    "peak_memory",
    "sequential",
    "simulate",
    "split_layers",
    "to_csv",
    "verify",
    "weight_traffic",
]
