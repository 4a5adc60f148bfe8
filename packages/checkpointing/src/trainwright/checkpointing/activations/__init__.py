"""Activation policies: what is kept for the backward pass and what is computed again."""

from trainwright.checkpointing.errors import (
    CheckpointingError,
    NotAvailableYetError,
    OffloadError,
    PolicyError,
    ReplayError,
)
from trainwright.checkpointing.protocol import Capture, Held, Keeper, LayerRunner, Reenter

from .ambient import capture_function_modes
from .compress import CastBFloat16, Compress, codec_named
from .decisions import decide_once
from .holding import HeldLayers, hold_by, holding
from .kept_operators import OperatorReport
from .measure import SavedBytes, measure
from .offload import HostMemory, Offload, offload_to_cpu
from .offload_file import FileStorage, offload_to_folder
from .operators import MATRIX_PRODUCTS
from .parsing import compose, parse_keeper, parse_policy
from .policy import (
    KeepAll,
    RecomputeEvery,
    RecomputeOptions,
    keep_all,
    recompute_all,
    recompute_every,
    recompute_sqrt,
)
from .recompute import Recomputed, recompute
from .selective import SelectiveRecompute, recompute_except, selective

__all__ = [
    "MATRIX_PRODUCTS",
    "Capture",
    "CastBFloat16",
    "CheckpointingError",
    "Compress",
    "FileStorage",
    "Held",
    "HeldLayers",
    "HostMemory",
    "KeepAll",
    "Keeper",
    "LayerRunner",
    "NotAvailableYetError",
    "Offload",
    "OffloadError",
    "OperatorReport",
    "PolicyError",
    "RecomputeEvery",
    "RecomputeOptions",
    "Recomputed",
    "Reenter",
    "ReplayError",
    "SavedBytes",
    "SelectiveRecompute",
    "capture_function_modes",
    "codec_named",
    "compose",
    "decide_once",
    "hold_by",
    "holding",
    "keep_all",
    "measure",
    "offload_to_cpu",
    "offload_to_folder",
    "parse_keeper",
    "parse_policy",
    "recompute",
    "recompute_all",
    "recompute_every",
    "recompute_except",
    "recompute_sqrt",
    "selective",
]
