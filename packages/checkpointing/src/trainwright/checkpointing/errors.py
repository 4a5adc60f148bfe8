"""Errors of the checkpointing package."""

from __future__ import annotations


class CheckpointingError(Exception):
    """Base of every error that this package raises on purpose."""

    def __str__(self) -> str:
        # Names from outside may hold what cannot be printed, and a message must come out.
        return super().__str__().encode(errors="backslashreplace").decode()


class PolicyError(CheckpointingError, ValueError):
    """An activation policy, or what it was given, does not make sense."""


class PlanError(PolicyError):
    """Costs or a plan of what activations to keep do not make sense; the message says which."""


class InfeasibleBudgetError(PlanError):
    """No plan stays within the budget.

    Args:
        message: Names the budget and the smallest one that can be met.
        smallest_budget_bytes: The smallest budget for which there is a plan.
    """

    def __init__(self, message: str, smallest_budget_bytes: int) -> None:
        super().__init__(message)
        self.smallest_budget_bytes = smallest_budget_bytes

    def __reduce__(self) -> tuple[type[InfeasibleBudgetError], tuple[str, int]]:
        return type(self), (str(self), self.smallest_budget_bytes)


class ReplayError(CheckpointingError, RuntimeError):
    """A recomputation would not see what the forward saw, so its gradients would be wrong."""


class OffloadError(CheckpointingError, RuntimeError):
    """Activations could not be written to where they were to be kept, or not be read back."""


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
