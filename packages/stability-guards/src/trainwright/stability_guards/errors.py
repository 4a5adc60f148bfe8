"""Errors of the stability-guards package."""


class GuardError(ValueError):
    """A user's mistake about clipping, schedules or guards; nothing has been changed."""


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
