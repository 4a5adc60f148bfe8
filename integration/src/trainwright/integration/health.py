"""What looks wrong with a run though nothing is done about it: it is said once, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainwright.integration.measuring import compute_seconds
from trainwright.integration.parts import Parts
from trainwright.integration.recipe import Observer, StepRecord
from trainwright.stability_guards import (
    GuardError,
    Heartbeat,
    State,
    StragglerWatch,
    Verdict,
    check_initial_loss,
    gather_seconds,
)

Tell = Callable[[str], None]


def say(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{text}\n")


def warnings_of(parts: Parts, tell: Tell = say) -> list[Observer]:
    """Return observers that tell of what looks wrong; every rank has as many.

    Args:
        parts: of this rank.
        tell: is given each warning, on the rank that has it.
    """
    return [InitialLoss(parts, tell), Stragglers(parts, tell)]


class InitialLoss:
    """Tells where the first loss of new weights is not that of a model that knows nothing.

    Args:
        parts: whose loss; weights that were loaded are believed.
        tell: is given the warning, on the first rank.
    """

    def __init__(self, parts: Parts, tell: Tell) -> None:
        first = parts.mesh.world.rank == 0 and parts.config.model.weights is None
        self._vocabulary = next(iter(parts.model.stages.values())).shape.vocabulary
        self._tell = tell if first else _nothing

    def __call__(self, record: StepRecord) -> None:
        """Look at the first step."""
        if record.step != 1 or record.verdict is not Verdict.CONTINUE:
            return
        try:
            check_initial_loss(record.loss, self._vocabulary)
        except GuardError as error:
            self._tell(f"warning: {error}")


class Stragglers:
    """Names ranks that compute longer than others with the same layers, several times in a row.

    Args:
        parts: of this rank; it looks at the steps that are measured.
        tell: is given the warning, on the first rank of those with the same layers, once a rank.
        watch: what is slow.

    Communicates: at a measured step an all-gather of 8 bytes a rank over those with the same
        layers; the host waits.
    """

    def __init__(self, parts: Parts, tell: Tell, watch: StragglerWatch | None = None) -> None:
        self._parts = parts
        self._tell = tell
        self._watch = StragglerWatch() if watch is None else watch
        self._state: State = self._watch.initial()
        self._named: set[int] = set()

    def __call__(self, record: StepRecord) -> None:
        """Compare the ranks if the step was measured."""
        timeline = None if record.pipeline is None else record.pipeline.timeline
        if timeline is None:
            return
        mesh = self._parts.mesh
        alike = mesh.communicator("dp", "cp", "tp")
        self._state, slow = self._watch.update(
            self._state, gather_seconds(compute_seconds(timeline), alike)
        )
        for found in slow:
            rank = mesh.ranks("dp", "cp", "tp")[found.rank]
            if rank in self._named:
                continue
            self._named.add(rank)
            if alike.rank == 0:
                self._tell(
                    f"warning: step {record.step}: rank {rank} of the world computes for "
                    f"{found.seconds:.3g} s, and the median rank with the same layers for "
                    f"{found.median_seconds:.3g} s, {self._watch.in_a_row} times in a row"
                )


@contextmanager
def pulse(rank: int, tell: Tell = say, *, least_s: float = 60.0) -> Iterator[Observer]:
    """Yield the observer after whose calls a rank may be silent ten usual steps, and no longer.

    It is told that it is, once a silence, by a thread of its own; nothing is stopped.

    Args:
        rank: of the world.
        tell: is given the warning.
        least_s: how long any step may take.
    """
    with Heartbeat(
        lambda silence: tell(f"warning: rank {rank}: {silence}"), least_s=least_s
    ) as heart:
        yield lambda record: heart.beat(record.step)


def _nothing(text: str) -> None:
    """Tell nobody."""
