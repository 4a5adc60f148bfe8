"""Recomputation routes every token as the forward did: decisions are kept, not taken again.

A region that is recomputed notes what its expert layers decided in the forward, in order, and a
recomputation reads it from there. Without a note, a forward within a backward is refused: a router
that is off by one rounding would send other rows than the peers wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast
from weakref import ref

import torch

from trainwright.sharding.errors import ShardingError

_T = TypeVar("_T")

_WAY_OUT = (
    "pass context_fn=routing_contexts to torch.utils.checkpoint.checkpoint(..., "
    "use_reentrant=False), or captures=[capture_routing] to "
    "trainwright.checkpointing.activations; re-entrant checkpoints cannot keep decisions"
)


def routing_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a forward and of its recomputations.

    It is a ``context_fn`` of `torch.utils.checkpoint.checkpoint`, called once a region.
    """
    notes = _Notes()
    recording = _Entered(lambda: _Recorder(ref(notes), _around()))
    return recording, _Entered(lambda: _Reader(notes))


def capture_routing() -> Callable[[], AbstractContextManager[None]]:
    """Begin to note decisions, and return what makes a recomputation read them.

    It is one of the ``captures`` of `trainwright.checkpointing.activations`, called at each forward
    of a region in a context that ends with it. The notes live as long as what is returned.
    """
    notes = _Notes()
    _state.set(_Recorder(ref(notes), _around()))
    return lambda: _Entered(lambda: _Reader(notes))


def decide(layer: object, make: Callable[[], _T]) -> _T:
    """Return what ``make`` decides, or in a recomputation what it had decided.

    Args:
        layer: Who decides; a recomputation asks in the same order.
        make: Decides; it may communicate.

    Raises:
        ShardingError: In a backward whose forward has left no notes, or notes of other layers.
    """
    state = _state.get()
    if torch._C._current_graph_task_id() != -1 and (state is None or not state.replays):
        raise ShardingError(
            f"{type(layer).__name__} is computed again in a backward, but nobody has kept where "
            f"its tokens went: {_WAY_OUT}"
        )
    return make() if state is None else cast(_T, state.next(layer, make))


class _State(Protocol):
    @property
    def replays(self) -> bool: ...

    def next(self, layer: object, make: Callable[[], Any]) -> Any: ...


_state: ContextVar[_State | None] = ContextVar("routing", default=None)


def _around() -> _State | None:
    """Return the state of the region around the one that begins."""
    state = _state.get()
    # What was captured in no context of its own is current for ever.
    while isinstance(state, _Recorder) and state.is_over:
        state = state.around
    return state


class _Notes(list[tuple[int, Any]]):
    """The decisions of one region, each with the layer that took it."""


class _Recorder:
    """Notes what is decided, here and in the region around."""

    def __init__(self, notes: ref[_Notes], around: _State | None) -> None:
        self.around = around
        self._notes = notes

    @property
    def is_over(self) -> bool:
        """Whether nobody can read the notes any more."""
        return self._notes() is None

    @property
    def replays(self) -> bool:
        return self.around is not None and self.around.replays

    def next(self, layer: object, make: Callable[[], Any]) -> Any:
        made = make() if self.around is None else self.around.next(layer, make)
        notes = self._notes()
        if notes is not None:
            notes.append((id(layer), made))
        return made


class _Reader:
    """Reads the notes of one region from the start."""

    replays = True

    def __init__(self, notes: _Notes) -> None:
        self._left = iter(tuple(notes))

    def next(self, layer: object, make: Callable[[], Any]) -> Any:
        known, made = next(self._left, (None, None))
        if known != id(layer):
            raise ShardingError(
                f"the recomputation routes through a {type(layer).__name__} at a point where the "
                "forward did not; recompute the same layers in the same order"
            )
        return made


class _Entered:
    """A context in which a fresh state is current; it may be entered again and again."""

    def __init__(self, make: Callable[[], _State]) -> None:
        self._make = make
        self._tokens: list[Token[_State | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_state.set(self._make()))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _state.reset(self._tokens.pop())
