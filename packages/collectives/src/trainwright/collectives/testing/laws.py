"""The laws that every communicator obeys; each is called on all ranks with the same case."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.collectives.protocol import Communicator
from trainwright.collectives.testing.cases import Case
from trainwright.collectives.testing.laws_of_messages import LAWS_OF_MESSAGES
from trainwright.collectives.testing.laws_of_movement import LAWS_OF_MOVEMENT
from trainwright.collectives.testing.laws_of_reductions import LAWS_OF_REDUCTIONS
from trainwright.collectives.testing.laws_of_usage import LAWS_OF_USAGE

Law = Callable[[Communicator, Case], None]

COMMUNICATOR_LAWS: tuple[Law, ...] = (
    *LAWS_OF_REDUCTIONS,
    *LAWS_OF_MOVEMENT,
    *LAWS_OF_MESSAGES,
    *LAWS_OF_USAGE,
)
