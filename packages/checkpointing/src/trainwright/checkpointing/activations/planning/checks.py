"""Validators of the values that plans are made from."""

from __future__ import annotations

import math
import re
from typing import Any

import attrs

from trainwright.checkpointing.errors import PlanError


def identifier(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Accept a name that plans can print: a letter, then letters, digits, ``_``, ``.``, ``-``."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.\-]*", value):
        raise PlanError(
            f"{_place(instance, attribute)} must start with a letter and hold letters, digits, "
            f"'_', '.', '-' only, got {value!r}"
        )


def text(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Accept a name of any letters, but no other thing than a text."""
    if not isinstance(value, str):
        raise PlanError(f"{_place(instance, attribute)} must be a text, got {value!r}")


def flag(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Accept True and False."""
    if type(value) is not bool:
        raise PlanError(f"{_place(instance, attribute)} must be True or False, got {value!r}")


def whole(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Accept a whole number of at least 0."""
    if type(value) is not int or value < 0:
        raise PlanError(
            f"{_place(instance, attribute)} must be a whole number, at least 0, got {value!r}"
        )


def non_negative(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Accept a finite number of at least 0."""
    if not _is_finite(value) or value < 0:  # type: ignore[operator]
        raise PlanError(
            f"{_place(instance, attribute)} must be a finite number, at least 0, got {value!r}"
        )


def positive(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Accept a finite number above 0."""
    if not _is_finite(value) or value <= 0:  # type: ignore[operator]
        raise PlanError(
            f"{_place(instance, attribute)} must be a finite number above 0, got {value!r}"
        )


def fraction(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Accept a number from 0 to 1."""
    if not _is_finite(value) or not 0 <= value <= 1:  # type: ignore[operator]
        raise PlanError(f"{_place(instance, attribute)} must be from 0 to 1, got {value!r}")


def unique(kind: str, names: list[str]) -> None:
    """Refuse names that occur twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PlanError(f"{kind} {name!r} is given twice; give each its own name")
        seen.add(name)


def budget(value: object) -> None:
    """Accept a budget in bytes."""
    if type(value) is not int or value < 0:
        raise PlanError(f"budget_bytes must be a whole number of bytes, at least 0, got {value!r}")


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and type(value) is not bool and math.isfinite(value)


def _place(instance: object, attribute: attrs.Attribute[Any]) -> str:
    name = getattr(instance, "name", None)
    of = f" of {name!r}" if isinstance(name, str) and attribute.name != "name" else ""
    return f"{type(instance).__name__}.{attribute.name}{of}"
