"""What tests of schedules draw: sizes, valid schedules of any shape, plans, damages, text."""

from trainwright.pipeline_schedules.testing.damages import damages
from trainwright.pipeline_schedules.testing.laws import check_generator, most_held
from trainwright.pipeline_schedules.testing.strategies import (
    generated_schedules,
    ownerships,
    valid_schedules,
    weight_plans,
)
from trainwright.pipeline_schedules.testing.text import from_text

__all__ = [
    "check_generator",
    "damages",
    "from_text",
    "generated_schedules",
    "most_held",
    "ownerships",
    "valid_schedules",
    "weight_plans",
]
