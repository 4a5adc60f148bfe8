"""Durable training state: sharded, checksummed, atomic, and loadable by any layout."""

from trainwright.checkpointing.errors import (
    CheckpointingError,
    CheckpointingWarning,
    DamagedCheckpointError,
    LoadFailedError,
    MismatchError,
    NoCheckpointError,
    NotAvailableYetError,
    SaveFailedError,
    TreeError,
    UntrustedError,
)
from trainwright.checkpointing.protocol import Files, Reader, Writer

from .asynchronous import Pending
from .files import LocalFiles
from .generators import RankGenerators
from .reading import Checkpoint, StoredPiece, TensorEntry, open_checkpoint
from .reporting import LoadReport
from .retention import Retention
from .store import StateStore
from .tree import Sharded

__all__ = [
    "Checkpoint",
    "CheckpointingError",
    "CheckpointingWarning",
    "DamagedCheckpointError",
    "Files",
    "LoadFailedError",
    "LoadReport",
    "LocalFiles",
    "MismatchError",
    "NoCheckpointError",
    "NotAvailableYetError",
    "Pending",
    "RankGenerators",
    "Reader",
    "Retention",
    "SaveFailedError",
    "Sharded",
    "StateStore",
    "StoredPiece",
    "TensorEntry",
    "TreeError",
    "UntrustedError",
    "Writer",
    "open_checkpoint",
]
