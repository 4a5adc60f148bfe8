"""Errors of the collectives package."""


class CollectiveError(RuntimeError):
    """Something went wrong in or around a collective operation."""

    def __str__(self) -> str:
        # Names from outside may hold what cannot be printed, and a message must come out.
        return super().__str__().encode(errors="backslashreplace").decode()


class UsageError(CollectiveError, ValueError):
    """The caller asked for something the contract does not allow.

    It is raised before any transfer, unless only a standstill shows that the calls of ranks differ.
    """


class BufferInFlightError(UsageError):
    """Memory that belongs to an operation was touched before that was waited for."""


class PeerFailedError(CollectiveError):
    """Another rank failed; ``rank`` names it (in the world) and ``cause`` says why."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} failed: {cause}")
        self.rank = rank
        self.cause = cause

    def __reduce__(self) -> tuple[type["PeerFailedError"], tuple[int, str]]:
        return type(self), (self.rank, self.cause)


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A peer did not arrive in time; the message names the operation and who is missing."""
