"""What computes with a model that is not trained: to be evaluated, to generate, to be exported."""

from __future__ import annotations

from typing import Protocol

from trainwright.integration.chunks import Chunks
from trainwright.integration.config import RunConfig
from trainwright.pipeline_schedules.execute import PipelineExecutor
from trainwright.sharding import Mesh


class ModelParts(Protocol):
    """The parts that hold the weights, on this rank; those of a training run are such parts."""

    @property
    def config(self) -> RunConfig:
        """The settings."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        ...

    @property
    def model(self) -> Chunks:
        """This rank's stages."""
        ...

    @property
    def executor(self) -> PipelineExecutor:
        """What runs all stages on microbatches."""
        ...

    @property
    def counts_tokens(self) -> float:
        """1.0 on the ranks of the last stage, else 0.0."""
        ...
