"""Errors of the checkpointing package."""

from __future__ import annotations


class CheckpointingError(Exception):
    """Base of every error that this package raises on purpose."""


class PolicyError(CheckpointingError, ValueError):
    """An activation policy, or what it was given, does not make sense."""


class ReplayError(CheckpointingError, RuntimeError):
    """A recomputation would not see what the forward saw, so its gradients would be wrong."""


class TreeError(CheckpointingError, ValueError):
    """The state given to `save` or `load` cannot be stored as it is; paths are named."""


class MismatchError(CheckpointingError, ValueError):
    """Checkpoint and target disagree; every path is listed with what was expected and found."""


class NoCheckpointError(CheckpointingError, LookupError):
    """There is no complete checkpoint of the step and run asked for."""


class SaveFailedError(CheckpointingError, RuntimeError):
    """A save did not happen on any rank; the message names the rank that failed and its cause."""


class LoadFailedError(CheckpointingError, RuntimeError):
    """A load stopped on every rank; the message names the rank that failed and its cause."""


class DamagedCheckpointError(CheckpointingError, RuntimeError):
    """A file is not what was written; the message names the file, what was expected and found."""


class UntrustedError(CheckpointingError, RuntimeError):
    """A file asks for what data never needs: to run code, to leave its folder, endless nesting."""


class NotAvailableYetError(CheckpointingError, NotImplementedError):
    """What was asked for is planned but not built."""


class CheckpointingWarning(UserWarning):
    """Something about a folder of checkpoints that its owner should look at."""
