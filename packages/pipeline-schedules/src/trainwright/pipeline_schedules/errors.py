"""The one error of the planning half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.pipeline_schedules.actions import Action


class ScheduleError(ValueError):
    """A schedule, or a request for one, that cannot work; the message says why.

    Attributes:
        places: The actions the failure is about, each as ``(rank, action)``; empty where the
            failure is not about actions.
    """

    def __init__(self, message: str, places: Sequence[tuple[int, Action]] = ()) -> None:
        super().__init__(message)
        self.places: tuple[tuple[int, Action], ...] = tuple(places)

    def __str__(self) -> str:
        # Names from outside may hold what cannot be printed, and a message must come out.
        return super().__str__().encode(errors="backslashreplace").decode()
