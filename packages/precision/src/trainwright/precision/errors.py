"""Errors of the precision package."""


class PrecisionError(ValueError):
    """A user's mistake about number formats; raised before anything has been changed."""


class NotAvailableError(PrecisionError, NotImplementedError):
    """Something that this package means to offer and does not offer yet."""


class ScalerOrderError(PrecisionError, RuntimeError):
    """A loss scaler's methods were called in an order that would give wrong gradients."""


class LossScaleError(PrecisionError, ArithmeticError):
    """The loss scale fell below its bound: gradients overflow whatever the scale."""
