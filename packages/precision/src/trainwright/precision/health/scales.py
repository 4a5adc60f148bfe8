"""When scales changed, and to what."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import attrs

from trainwright.precision.errors import PrecisionError
from trainwright.precision.scale_settings import as_count, as_float

from .counting import table


@attrs.define
class ScaleHistory:
    """The changes of loss and quantisation scales over the steps; its str is a table.

    Args:
        max_changes: how many changes of each scale are kept; older ones are forgotten.

    Raises:
        PrecisionError: there would be no change to keep.
    """

    max_changes: int = attrs.field(default=1000)
    _changes: dict[str, list[tuple[int, float]]] = attrs.field(factory=dict, init=False)

    @max_changes.validator
    def _check_max_changes(self, _: object, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PrecisionError(f"max_changes must be a whole number from 1, got {value!r}")

    def record(self, step: int, scales: Mapping[str, float]) -> None:
        """Note the scales of a step, such as ``{"loss": scaler.get_scale()}``.

        Raises:
            PrecisionError: the step lies before one that was noted; nothing is noted then.
        """
        for name in scales:
            if self._changes.get(name) and step < self._changes[name][-1][0]:
                raise PrecisionError(
                    f"scales of step {step} come after those of step {self._changes[name][-1][0]}; "
                    "load the history's state where training goes back"
                )
        for name, scale in scales.items():
            changes = self._changes.setdefault(name, [])
            if changes and changes[-1][1] == scale:
                continue
            changes.append((step, float(scale)))
            del changes[: -self.max_changes]

    def changes(self, name: str) -> tuple[tuple[int, float], ...]:
        """Return (step, scale from that step on) of a scale, oldest first."""
        return tuple(self._changes.get(name, ()))

    def state_dict(self) -> dict[str, Any]:
        """Return the history as lists and plain numbers."""
        return {name: [list(c) for c in found] for name, found in self._changes.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a history; keep of it what ``max_changes`` allows.

        Raises:
            PrecisionError: it is none; nothing is changed then.
        """
        try:
            self._changes = {
                name: [
                    (as_count("a step", step), as_float("a scale", scale)) for step, scale in found
                ][-self.max_changes :]
                for name, found in state_dict.items()
                if found
            }
        except (TypeError, ValueError, AttributeError) as error:
            raise PrecisionError(
                "a history of scales must hold lists of [step, scale] by name, got "
                f"{state_dict!s:.80}: {error}"
            ) from error

    def __str__(self) -> str:
        """Return a table with a line a scale."""
        rows = []
        for name, found in self._changes.items():
            scales = [scale for _, scale in found]
            falls = sum(a > b for a, b in itertools.pairwise(scales))
            rises = sum(a < b for a, b in itertools.pairwise(scales))
            numbers = (f"{n:g}" for n in (scales[-1], min(scales), max(scales)))
            rows.append((name, *numbers, str(falls), str(rises), str(found[-1][0])))
        return table(("scale", "now", "least", "most", "falls", "rises", "since step"), rows)
