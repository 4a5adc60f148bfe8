"""Errors of the precision package."""


class PrecisionError(ValueError):
    """A user's mistake about number formats; raised before anything has been changed."""

    def __str__(self) -> str:
        # Names from outside may hold what cannot be printed, and a message must come out.
        return super().__str__().encode(errors="backslashreplace").decode()


class NotAvailableError(PrecisionError, NotImplementedError):
    """Something that this package means to offer and does not offer yet."""


class ScalerOrderError(PrecisionError, RuntimeError):
    """A loss scaler's methods were called in an order that would give wrong gradients."""


class LossScaleError(PrecisionError, ArithmeticError):
    """The loss scale fell below its bound: gradients overflow whatever the scale."""
