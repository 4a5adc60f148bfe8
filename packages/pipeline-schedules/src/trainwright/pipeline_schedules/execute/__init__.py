"""Running a schedule: any modules as stages, any transport between them, one small executor."""

from trainwright.pipeline_schedules.execute.boundary import BoundarySpec, TensorSpec
from trainwright.pipeline_schedules.execute.errors import (
    BoundaryError,
    NotAvailableError,
    PipelineError,
)
from trainwright.pipeline_schedules.execute.executor import PipelineExecutor
from trainwright.pipeline_schedules.execute.protocol import (
    Inputs,
    Loss,
    Reducer,
    Transport,
    WeightKeeper,
)
from trainwright.pipeline_schedules.execute.result import StepResult, Timed

__all__ = [
    "BoundaryError",
    "BoundarySpec",
    "Inputs",
    "Loss",
    "NotAvailableError",
    "PipelineError",
    "PipelineExecutor",
    "Reducer",
    "StepResult",
    "TensorSpec",
    "Timed",
    "Transport",
    "WeightKeeper",
]
