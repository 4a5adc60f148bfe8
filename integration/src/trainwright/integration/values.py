"""What a setting may be: the checks of single values, each naming its option."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any

import attrs

from trainwright.integration.errors import ConfigError


def positive(_: Any, field: attrs.Attribute[Any], value: float) -> None:
    """Refuse what is not a positive finite number, or too large for a 64-bit whole number."""
    if isinstance(value, int) and value >= 2**63:
        raise ConfigError(f"{option(field.name)} must be below 2**63, got {value}")
    if not 0 < value < math.inf:
        raise ConfigError(f"{option(field.name)} must be positive and finite, got {value}")


def not_negative(_: Any, field: attrs.Attribute[Any], value: float) -> None:
    """Refuse what is negative, not finite, or too large for a 64-bit whole number."""
    if isinstance(value, int) and value >= 2**63:
        raise ConfigError(f"{option(field.name)} must be below 2**63, got {value}")
    if not 0 <= value < math.inf:
        raise ConfigError(f"{option(field.name)} must be finite and not negative, got {value}")


def share(_: Any, field: attrs.Attribute[Any], value: float) -> None:
    """Refuse what is no part of a whole."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{option(field.name)} must be from 0 to 1, got {value}")


def one_of(allowed: tuple[Any, ...]) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return the check that a value is one of ``allowed``; the error names the nearest."""

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value not in allowed:
            near = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            known = ", ".join(str(a) for a in allowed)
            raise ConfigError(f"{option(field.name)} must be one of {known}, got {value}{hint}")

    return check


def counted(number: int, name: str, plural: str = "s") -> str:
    """Return a number with what it counts, such as ``1 microbatch`` or ``1,024 microbatches``."""
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}{plural}"


def option(field_name: str) -> str:
    """Return the command line's name of a setting."""
    return "--" + field_name.replace("_", "-")
