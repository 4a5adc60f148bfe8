"""A schedule: what every rank does, in which order, as one packed and immutable value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainwright.pipeline_schedules.actions import Action, Kind
from trainwright.pipeline_schedules.errors import ScheduleError

Rows = NDArray[np.int32]
"""Actions of a rank, in order: int32 ``[n, 3]`` of kind, stage, microbatch."""


RowsLike = ArrayLike | Sequence[Action]
"""What can be made into rows: integers of shape ``[n, 3]``, or actions."""


def _packed_rows(actions: Sequence[RowsLike]) -> tuple[Rows, ...]:
    """Copy every rank's rows into one read-only array and give each rank its view of it."""
    if len(actions) == 0:
        raise ScheduleError("a schedule needs at least one rank, got none")
    per_rank = [_as_rows(rows, rank) for rank, rows in enumerate(actions)]
    packed = np.concatenate(per_rank, axis=0, dtype=np.int32)
    packed.flags.writeable = False
    ends = np.cumsum([len(rows) for rows in per_rank])
    return tuple(packed[end - len(rows) : end] for end, rows in zip(ends, per_rank, strict=True))


def _as_rows(rows: RowsLike, rank: int) -> Rows:
    if isinstance(rows, Sequence) and not isinstance(rows, str | bytes):
        rows = [attrs.astuple(row) if isinstance(row, Action) else row for row in rows]
    array = np.asarray(rows)
    if array.size == 0:
        return np.empty((0, 3), dtype=np.int32)
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "iu":
        raise ScheduleError(
            f"actions of rank {rank} must be integers of shape [n, 3] (kind, stage, microbatch), "
            f"got {array.dtype} of shape {list(array.shape)}"
        )
    bounds = np.iinfo(np.int32)
    if array.dtype != np.int32 and not bounds.min <= array.min() <= array.max() <= bounds.max:
        raise ScheduleError(
            f"actions of rank {rank} must fit int32, got {array.min()} to {array.max()}"
        )
    return array.astype(np.int32, copy=False)


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


@attrs.frozen(eq=False, repr=False)
class Schedule:
    """What every rank of a pipeline does, in order; data without behaviour.

    Construction checks only the form. Whether the schedule works is what `verify` says, so that
    imported and searched schedules can be looked at before they are right.

    Two schedules are equal when they do the same; ``name`` is a label and does not count.

    Args:
        actions: For each rank its actions in order, as `Action` values or as integers ``[n, 3]``
            (kind, stage, microbatch). They are copied; kept are read-only int32 views of one
            buffer, `packed`.
        rank_of_stage: The rank that owns each stage.
        num_microbatches: Microbatches of one step.
        name: What to call it in drawings and tables.
        forward_only: No backward is expected (evaluation).
        lowered: Boundary transfers and reductions stand in the schedule as actions.

    Raises:
        ScheduleError: Wrong shape or dtype, unknown kind, a rank that does not exist.
    """

    actions: tuple[Rows, ...] = attrs.field(converter=_packed_rows)
    rank_of_stage: tuple[int, ...] = attrs.field(converter=_ints)
    num_microbatches: int = attrs.field(converter=int)
    name: str = ""
    forward_only: bool = attrs.field(default=False, kw_only=True)
    lowered: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ScheduleError(f"num_microbatches must be at least 1, got {self.num_microbatches}")
        if not self.rank_of_stage:
            raise ScheduleError("rank_of_stage must name a rank for at least one stage, got none")
        for stage, rank in enumerate(self.rank_of_stage):
            if not 0 <= rank < self.num_ranks:
                raise ScheduleError(
                    f"stage {stage} is on rank {rank}, but the schedule has actions for ranks "
                    f"0 to {self.num_ranks - 1}"
                )
        kinds = self.packed[:, 0]
        unknown = np.unique(kinds[(kinds < 0) | (kinds > max(Kind))]).tolist()
        if unknown:
            raise ScheduleError(f"kinds must lie between 0 and {max(Kind):d}, got {unknown}")

    @property
    def num_stages(self) -> int:
        """Stages of the model, over all ranks."""
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def num_actions(self) -> int:
        """Actions of all ranks together."""
        return len(self.packed)

    @property
    def packed(self) -> Rows:
        """The rows of all ranks, one rank after the other, as one read-only int32 ``[n, 3]``."""
        base = self.actions[0].base
        assert base is not None, "the rows of every rank are views"
        return base

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where each rank's rows begin in `packed`, and its length at the end: ``[ranks + 1]``."""
        lengths = [len(rows) for rows in self.actions]
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def program(self, rank: int) -> tuple[Action, ...]:
        """The actions of one rank, in order, as readable values."""
        return tuple(Action(Kind(k), s, i) for k, s, i in self.actions[rank].tolist())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank owns, ascending."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        for rank in range(self.num_ranks):
            for action in self.program(rank):
                yield rank, action

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._identity() == other._identity() and np.array_equal(self.packed, other.packed)

    def __hash__(self) -> int:
        return hash((self._identity(), self.packed.tobytes()))

    def _identity(self) -> tuple[object, ...]:
        lengths = tuple(len(rows) for rows in self.actions)
        shape = (self.rank_of_stage, self.num_microbatches, lengths)
        return (*shape, self.forward_only, self.lowered)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.actions, attrs.asdict(self, filter=_is_plain))

    def __repr__(self) -> str:
        label = self.name or "unnamed"
        return (
            f"<Schedule {label}: {self.num_stages} stages on {self.num_ranks} ranks, "
            f"{self.num_microbatches} microbatches, {self.num_actions} actions>"
        )

    def __str__(self) -> str:
        lines = [
            f"rank {rank}: " + " ".join(str(action) for action in self.program(rank))
            for rank in range(self.num_ranks)
        ]
        return "\n".join(lines)


def _is_plain(attribute: attrs.Attribute[object], value: object) -> bool:
    return attribute.name != "actions"


def _rebuild(actions: Sequence[Rows], rest: dict[str, object]) -> Schedule:
    return Schedule(actions, **rest)  # type: ignore[arg-type]
