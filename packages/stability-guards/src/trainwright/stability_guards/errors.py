"""Errors of the stability-guards package."""


class GuardError(ValueError):
    """A user's mistake about clipping, schedules or guards; nothing has been changed."""

    def __str__(self) -> str:
        # Names from outside may hold what cannot be printed, and a message must come out.
        return super().__str__().encode(errors="backslashreplace").decode()


class NotAvailableError(GuardError, NotImplementedError):
    """Something that this package means to offer and does not offer yet."""


class NonFiniteGradientError(GuardError, ArithmeticError):
    """The norm of the gradients is infinite or NaN; the gradients are untouched."""


class HaltError(RuntimeError):
    """Training must stop; the message says which rank wants it and why."""


class JournalError(GuardError):
    """A journal of interventions is damaged or would be."""


class AbandonedStateError(GuardError):
    """A checkpoint holds training that a rollback has taken back."""
