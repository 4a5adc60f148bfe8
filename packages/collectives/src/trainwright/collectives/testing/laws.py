"""The laws that every communicator obeys; each is called on all ranks with the same case."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.collectives.protocol import Communicator
from trainwright.collectives.testing import laws_of_messages as messages
from trainwright.collectives.testing import laws_of_movement as movement
from trainwright.collectives.testing import laws_of_reductions as reductions
from trainwright.collectives.testing.cases import Case
from trainwright.collectives.testing.laws_of_usage import LAWS_OF_USAGE

Law = Callable[[Communicator, Case], None]

COMMUNICATOR_LAWS: tuple[Law, ...] = (
    *reductions.LAWS_OF_REDUCTIONS,
    *movement.LAWS_OF_MOVEMENT,
    *messages.LAWS_OF_MESSAGES,
    *LAWS_OF_USAGE,
)

# Worth trying on many cases; the others use a case's root or operation, or nothing of it.
LAWS_ABOUT_SHAPES: frozenset[Law] = frozenset(
    {
        reductions.all_reduce_combines_exactly,
        reductions.all_reduce_is_reduce_then_broadcast,
        reductions.reduce_scatter_is_reduce_then_scatter,
        reductions.all_reduce_is_reduce_scatter_then_all_gather,
        movement.all_gather_is_gather_then_broadcast,
        movement.broadcast_copies_the_root,
        movement.scatter_undoes_gather,
        movement.all_to_all_twice_is_nothing,
        movement.own_slices_may_be_passed,
        messages.messages_go_round_a_ring,
        messages.exchanges_cannot_deadlock,
    }
)
