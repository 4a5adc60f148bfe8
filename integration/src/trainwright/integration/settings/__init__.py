"""The settings of a run, a file a section."""

from trainwright.integration.settings.activations import ActivationSettings
from trainwright.integration.settings.batch import BatchSettings
from trainwright.integration.settings.data import DataSettings
from trainwright.integration.settings.evaluation import EvaluationSettings
from trainwright.integration.settings.guards import GuardSettings
from trainwright.integration.settings.model import ModelSettings
from trainwright.integration.settings.optimizer import OptimizerSettings
from trainwright.integration.settings.parallel import ParallelSettings
from trainwright.integration.settings.rate import RateSettings
from trainwright.integration.settings.saving import SavingSettings
from trainwright.integration.settings.scaling import ScalingSettings
from trainwright.integration.settings.watching import WatchingSettings

__all__ = [
    "ActivationSettings",
    "BatchSettings",
    "DataSettings",
    "EvaluationSettings",
    "GuardSettings",
    "ModelSettings",
    "OptimizerSettings",
    "ParallelSettings",
    "RateSettings",
    "SavingSettings",
    "ScalingSettings",
    "WatchingSettings",
]
