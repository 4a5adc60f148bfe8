"""The one norm: what all ranks agree on before an update, in one reduction."""

from trainwright.sharding.norm.sums import (
    largest_magnitude,
    non_finite_count,
    power_sum,
    square_sum,
)
from trainwright.sharding.norm.totals import StepTotals, one_norm

__all__ = [
    "StepTotals",
    "largest_magnitude",
    "non_finite_count",
    "one_norm",
    "power_sum",
    "square_sum",
]
