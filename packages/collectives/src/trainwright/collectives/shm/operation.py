"""An operation under way: steps that go as far as the peers allow."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Protocol

import torch

from trainwright.collectives.errors import UsageError

if TYPE_CHECKING:
    from trainwright.collectives.shm.domain import Domain

# Yields where it has to wait for a peer.
Steps = Generator[None, None, None]


class Underway(Protocol):
    """An operation that whoever waits for anything takes further.

    ``what`` and ``group_name`` are for messages; ``error`` is what the operation has raised.
    """

    what: object
    group_name: str
    error: Exception | None
    is_over: bool

    def advance(self) -> Exception | None:
        """Go on as far as possible; return an error that the peers cannot know of, if any."""

    def missing(self) -> list[int]:
        """Return the ranks, counted in the world, that it waits for."""


class Operation:
    """Steps that are resumed again and again, by whoever waits for anything, until they end.

    Args:
        what: the operation, for messages.
        group_name: the group, for messages.
        steps: the work; it yields where it cannot go on.
        missing: tells the ranks, counted in the world, that it waits for.
        is_inference: whether it writes a tensor that only inference mode may write.
    """

    __slots__ = ("_is_inference", "_steps", "error", "group_name", "is_over", "missing", "what")

    def __init__(
        self,
        what: object,
        group_name: str,
        steps: Steps,
        missing: Callable[[], list[int]],
        is_inference: bool,
    ) -> None:
        self.what = what
        self.group_name = group_name
        self.missing = missing
        self.error: Exception | None = None
        self.is_over = False
        self._steps: Steps | None = steps
        self._is_inference = is_inference

    def advance(self) -> Exception | None:
        """Go on as far as possible; return an error that the peers cannot know of, if any."""
        if self._steps is None:
            return None
        try:
            if self._is_inference:
                with torch.inference_mode():
                    next(self._steps)
            else:
                next(self._steps)
        except StopIteration:
            self._end(None)
        except Exception as error:
            self._end(error)
            if not isinstance(error, UsageError):
                return error
        return None

    def _end(self, error: Exception | None) -> None:
        self.error = error
        self.is_over = True
        self._steps = None


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, unless both are the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


class ShmWork:
    """The Work of an operation."""

    __slots__ = ("_domain", "_operation", "_timeout_s")

    def __init__(self, domain: Domain, operation: Operation, timeout_s: float | None) -> None:
        self._domain = domain
        self._operation = operation
        self._timeout_s = timeout_s

    def wait(self, timeout_s: float | None = None) -> None:
        """Take part until the operation is over."""
        operation = self._operation
        if not operation.is_over:
            self._domain.wait(operation, timeout_s or self._timeout_s)
        if operation.error is not None:
            raise operation.error

    def is_done(self, within_s: float = 0.0) -> bool:
        """Take part for a while; return whether the operation is over."""
        return self._operation.is_over or self._domain.pursue(self._operation, within_s)
