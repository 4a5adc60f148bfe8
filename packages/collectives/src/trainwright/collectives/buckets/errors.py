"""What is raised for gradients that are not there."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.collectives.errors import CollectiveError


class UnusedParameterError(CollectiveError):
    """Some rank's backward passes gave a parameter no gradient; ``names`` says which."""

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)
