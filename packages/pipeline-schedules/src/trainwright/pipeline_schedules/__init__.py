"""Pipeline schedules as verified, simulated, drawn and executed data; the planning half."""

from trainwright.pipeline_schedules.actions import NO_MICROBATCH, Action, Kind
from trainwright.pipeline_schedules.costs import Costs
from trainwright.pipeline_schedules.draw import draw
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.exchange import (
    TableError,
    from_csv,
    read_csv,
    to_csv,
    write_csv,
)
from trainwright.pipeline_schedules.generate import (
    forward_only,
    gpipe,
    one_f_one_b,
    sequential,
)
from trainwright.pipeline_schedules.generate_looped import breadth_first, interleaved_1f1b
from trainwright.pipeline_schedules.generate_v import dualpipe_v, zb_v
from trainwright.pipeline_schedules.generate_zero_bubble import zb_h1, zb_h2
from trainwright.pipeline_schedules.generators import GENERATORS, Generator
from trainwright.pipeline_schedules.layers import split_layers
from trainwright.pipeline_schedules.lowering import lower
from trainwright.pipeline_schedules.memory import Memory, peak_activations, peak_memory
from trainwright.pipeline_schedules.notation import action_letters
from trainwright.pipeline_schedules.pairs import unpaired
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.search import Found, search, v_shape
from trainwright.pipeline_schedules.simulate import Simulation, simulate
from trainwright.pipeline_schedules.svg import svg
from trainwright.pipeline_schedules.trace import trace
from trainwright.pipeline_schedules.verify import verify
from trainwright.pipeline_schedules.weight_plan import WeightPlan
from trainwright.pipeline_schedules.weight_traffic import WeightTraffic, peak_live, weight_traffic

__all__ = [
    "GENERATORS",
    "NO_MICROBATCH",
    "Action",
    "Costs",
    "Found",
    "Generator",
    "Kind",
    "Memory",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "TableError",
    "WeightPlan",
    "WeightTraffic",
    "action_letters",
    "breadth_first",
    "draw",
    "dualpipe_v",
    "forward_only",
    "from_csv",
    "gpipe",
    "interleaved_1f1b",
    "lower",
    "one_f_one_b",
    "peak_activations",
    "peak_live",
    "peak_memory",
    "read_csv",
    "search",
    "sequential",
    "simulate",
    "split_layers",
    "svg",
    "to_csv",
    "trace",
    "unpaired",
    "v_shape",
    "verify",
    "weight_traffic",
    "write_csv",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
