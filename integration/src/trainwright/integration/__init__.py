"""3D-parallel training of language models, composed from the trainwright libraries."""

from trainwright.integration.config import RunConfig
from trainwright.integration.data import Corpus, Reader, read_corpus
from trainwright.integration.errors import (
    ConfigError,
    DataError,
    RunFolderError,
    TrainwrightError,
)
from trainwright.integration.evaluation import evaluate
from trainwright.integration.generation import generate
from trainwright.integration.model import ModelShape
from trainwright.integration.parts import Parts, Progress, assemble
from trainwright.integration.recipe import StepRecord, train
from trainwright.integration.training_state import restore_state, save_state

__all__ = [
    "ConfigError",
    "Corpus",
    "DataError",
    "ModelShape",
    "Parts",
    "Progress",
    "Reader",
    "RunConfig",
    "RunFolderError",
    "StepRecord",
    "TrainwrightError",
    "assemble",
    "evaluate",
    "generate",
    "read_corpus",
    "restore_state",
    "save_state",
    "train",
]
