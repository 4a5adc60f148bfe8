"""JSON as its standard has it, without NaN and infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def strict_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Return plain data as JSON; NaN and infinity are written as null.

    Args:
        values: the data.
        indent: spaces a level; None for a single line.
    """
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
