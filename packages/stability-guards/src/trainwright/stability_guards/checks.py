"""Checks of the numbers that guards are made with."""

from __future__ import annotations

from typing import Any

import attrs

from trainwright.stability_guards.errors import GuardError


def positive(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Refuse what is not a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0.0:
        raise GuardError(f"{attribute.name} must be positive, got {value!r}")


def whole(least: int) -> Any:
    """Return the validator that refuses what is not a whole number from ``least``."""

    def check(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise GuardError(f"{attribute.name} must be a whole number from {least}, got {value!r}")

    return check
