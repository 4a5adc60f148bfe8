"""Number formats, loss scaling and FP32 master weights for PyTorch training."""

from trainwright.precision.casting import AppliedPolicy
from trainwright.precision.constant_scaling import (
    StaticLossScaler,
    UnitLossScaler,
)
from trainwright.precision.deferred import Verdict
from trainwright.precision.dynamic_scaling import DynamicLossScaler
from trainwright.precision.errors import (
    LossScaleError,
    NotAvailableError,
    PrecisionError,
    ScalerOrderError,
)
from trainwright.precision.kinds import (
    KINDS,
    ModuleKind,
)
from trainwright.precision.master import MasterWeights
from trainwright.precision.moments import (
    BFloat16Moments,
    BlockMoments,
    Moments,
)
from trainwright.precision.policy import (
    DtypePolicy,
    policy,
)
from trainwright.precision.presets import (
    ALIASES,
    PRESETS,
    Preset,
)
from trainwright.precision.protocol import (
    LossScaler,
    SteppableOptimizer,
)
from trainwright.precision.rounded_weights import RoundedWeights
from trainwright.precision.scale_settings import Hysteresis
from trainwright.precision.weight_rounding import (
    KahanCompensation,
    StochasticRounding,
    WeightRounding,
)

__all__ = [
    "ALIASES",
    "KINDS",
    "PRESETS",
    "AppliedPolicy",
    "BFloat16Moments",
    "BlockMoments",
    "DtypePolicy",
    "DynamicLossScaler",
    "Hysteresis",
    "KahanCompensation",
    "LossScaleError",
    "LossScaler",
    "MasterWeights",
    "ModuleKind",
    "Moments",
    "NotAvailableError",
    "PrecisionError",
    "Preset",
    "RoundedWeights",
    "ScalerOrderError",
    "StaticLossScaler",
    "SteppableOptimizer",
    "StochasticRounding",
    "UnitLossScaler",
    "Verdict",
    "WeightRounding",
    "policy",
]
