"""Errors of the sharding package."""


class ShardingError(ValueError):
    """The caller asked for something that cannot be; raised before any communication."""

    def __str__(self) -> str:
        # Names from outside may hold what cannot be printed, and a message must come out.
        return super().__str__().encode(errors="backslashreplace").decode()


class NotAvailableError(ShardingError, NotImplementedError):
    """A documented part of the interface that this version does not have yet."""


class ReplicaMismatchError(ShardingError):
    """Tensors that were declared replicated differ between ranks."""
