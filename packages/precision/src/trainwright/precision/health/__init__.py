"""What a low-precision run loses: digits of tensors, updates of weights; its scales over time."""

from trainwright.precision.health.counting import (
    Sample,
    Share,
)
from trainwright.precision.health.ranges import (
    RangeReport,
    TensorRange,
    range_report,
)
from trainwright.precision.health.scales import ScaleHistory
from trainwright.precision.health.updates import (
    TensorUpdates,
    UpdateReport,
    UpdateWatch,
)

__all__ = [
    "RangeReport",
    "Sample",
    "ScaleHistory",
    "Share",
    "TensorRange",
    "TensorUpdates",
    "UpdateReport",
    "UpdateWatch",
    "range_report",
]
