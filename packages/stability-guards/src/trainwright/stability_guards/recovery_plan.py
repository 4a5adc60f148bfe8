"""How a run goes back, and the reader of batches that goes back with it."""

from __future__ import annotations

from typing import Any, Protocol

import attrs

from trainwright.stability_guards.checks import whole
from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.positions import Positions


class BatchSource(Protocol):
    """A reader of batches that can be moved and told what to leave out.

    Its position counts the global order of the data, the same on every rank; `Positions.draw` says
    which positions a batch holds.
    """

    @property
    def position(self) -> int:
        """Data position behind the batch handed out last, whatever has been read ahead."""
        ...

    @property
    def last(self) -> Positions:
        """Positions of the batch that was handed out last, the one that is judged next."""
        ...

    def seek(self, position: int, left_out: Positions) -> None:
        """Read on from ``position``, never any of ``left_out``; forget what was read ahead."""
        ...


def _optional_count(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None:
        whole(0)(_, attribute, value)


def _yes_or_no(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if type(value) is not bool:
        raise GuardError(f"{attribute.name} must be true or false, got {value!r}")


@attrs.frozen
class RecoveryPlan:
    """How a run goes back, and how often.

    Args:
        snapshot_every: steps from one snapshot to the next.
        skip_before: batches read before the judged one that a ROLLBACK leaves out with it; None
            leaves out everything read since the snapshot, so that reading goes on behind it.
        max_rollbacks: in succession; one more is a HALT.
        settled_after: applied updates beyond the last rollback's after which the next one is the
            first again.
        replay_skipped: whether a skipped batch is read again after the run has gone back or has
            resumed from before it: right where steps are skipped while a loss scale finds its
            place, and not because of their data.
    """

    snapshot_every: int = attrs.field(default=100, validator=whole(1))
    skip_before: int | None = attrs.field(default=2, validator=_optional_count)
    max_rollbacks: int = attrs.field(default=3, validator=whole(0))
    settled_after: int = attrs.field(default=1000, validator=whole(0))
    replay_skipped: bool = attrs.field(default=False, validator=_yes_or_no)
