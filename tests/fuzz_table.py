"""A table of what readers did with damaged inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


def table(parts: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Return one line a reader: inputs, how many were accepted and refused by which error, time.

    Args:
        parts: A reader's name and the fields of a `Summary` of a part of its inputs.
    """
    lines = [f"{'reader':34} {'inputs':>8} {'accepted':>8} {'seconds':>8} {'a second':>8}  refused"]
    together: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for name, summary in parts:
        numbers, refused = together.setdefault(name, (Counter(), Counter()))
        numbers.update({key: value for key, value in summary.items() if key != "refused"})
        refused.update(summary["refused"])
    for name, (numbers, refused) in sorted(together.items()):
        by_error = ", ".join(f"{error} {count}" for error, count in refused.most_common())
        rate = numbers["inputs"] / max(numbers["seconds"], 1e-9)
        counts = f"{numbers['inputs']:8d} {numbers['accepted']:8d}"
        lines.append(f"{name:34} {counts} {numbers['seconds']:8.1f} {rate:8.0f}  {by_error}")
    return "\n".join(lines)
