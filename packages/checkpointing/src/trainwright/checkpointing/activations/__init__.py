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
from .apply import apply
from .budget import WithinBudget, within_budget
from .compress import CastBFloat16, Compress, codec_named
from .decisions import decide_once
from .following import PlannedLayers, default_store, follow
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
from .shards import KeepShards, keep_shards
from .table import LayerShape, Saved, gpt_layer, input_bytes, llama_layer, saved_bytes

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
    "KeepShards",
    "Keeper",
    "LayerRunner",
    "LayerShape",
    "NotAvailableYetError",
    "Offload",
    "OffloadError",
    "OperatorReport",
    "PlannedLayers",
    "PolicyError",
    "RecomputeEvery",
    "RecomputeOptions",
    "Recomputed",
    "Reenter",
    "ReplayError",
    "Saved",
    "SavedBytes",
    "SelectiveRecompute",
    "WithinBudget",
    "apply",
    "capture_function_modes",
    "codec_named",
    "compose",
    "decide_once",
    "default_store",
    "follow",
    "gpt_layer",
    "hold_by",
    "holding",
    "input_bytes",
    "keep_all",
    "keep_shards",
    "llama_layer",
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
    "saved_bytes",
    "selective",
    "within_budget",
]
