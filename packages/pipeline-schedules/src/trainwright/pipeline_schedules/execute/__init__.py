"""Running a schedule: any modules as stages, any transport between them, one small executor."""

from trainwright.pipeline_schedules.execute.boundary import BoundarySpec, Skip, TensorSpec
from trainwright.pipeline_schedules.execute.errors import (
    BoundaryError,
    PipelineError,
)
from trainwright.pipeline_schedules.execute.executor import PipelineExecutor
from trainwright.pipeline_schedules.execute.output import StageOutput
from trainwright.pipeline_schedules.execute.protocol import (
    Gradients,
    Inputs,
    Loss,
    Reducer,
    SplitOperation,
    Transport,
    WeightKeeper,
)
from trainwright.pipeline_schedules.execute.result import StepResult, Timed
from trainwright.pipeline_schedules.execute.split import SplitProducts
from trainwright.pipeline_schedules.execute.weight_gradients import WeightGradients

__all__ = [
    "BoundaryError",
    "BoundarySpec",
    "Gradients",
    "Inputs",
    "Loss",
    "PipelineError",
    "PipelineExecutor",
    "Reducer",
    "Skip",
    "SplitOperation",
    "SplitProducts",
    "StageOutput",
    "StepResult",
    "TensorSpec",
    "Timed",
    "Transport",
    "WeightGradients",
    "WeightKeeper",
]
