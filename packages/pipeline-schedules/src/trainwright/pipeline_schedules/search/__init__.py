"""Search for schedules that suit given costs and memory."""

from trainwright.pipeline_schedules.search.finding import Found, search, v_shape
from trainwright.pipeline_schedules.search.problem import Objective

__all__ = [
    "Found",
    "Objective",
    "search",
    "v_shape",
]
