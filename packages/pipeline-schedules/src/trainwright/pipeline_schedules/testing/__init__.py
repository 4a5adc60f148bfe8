"""What tests of schedules draw: sizes, valid schedules of any shape, and small damages to them."""

from trainwright.pipeline_schedules.testing.damages import damages
from trainwright.pipeline_schedules.testing.strategies import (
    GENERATORS,
    generated_schedules,
    ownerships,
    valid_schedules,
)

__all__ = [
    "GENERATORS",
    "damages",
    "generated_schedules",
    "ownerships",
    "valid_schedules",
]
