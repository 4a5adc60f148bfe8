"""The weights of one run: which keepers are gathered, and what has to be released."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.pipeline_schedules.execute.protocol import WeightKeeper


class GatheredWeights:
    """What is coming and what is whole, so that a failure leaves nothing gathered.

    Args:
        keepers: By stage; one may serve several.
    """

    def __init__(self, keepers: Mapping[int, WeightKeeper]) -> None:
        self._keepers = keepers
        self._coming: dict[int, WeightKeeper] = {}
        self._whole: dict[int, WeightKeeper] = {}

    def gather(self, stage: int) -> None:
        """Start to gather a stage's weights."""
        keeper = self._keepers[stage]
        # Noted first: what raises half-way has to be released too.
        self._coming[id(keeper)] = keeper
        keeper.gather()

    def await_weights(self, stage: int) -> None:
        """Wait for a stage's weights."""
        keeper = self._keepers[stage]
        keeper.await_weights()
        self._whole[id(keeper)] = self._coming.pop(id(keeper))

    def release(self, stage: int) -> None:
        """Release a stage's weights."""
        keeper = self._keepers[stage]
        keeper.release()
        del self._whole[id(keeper)]

    def release_whole(self) -> list[Exception]:
        """After a failure, release what is whole; gives back what failed on top of it."""
        return _release(self._whole)

    def release_coming(self) -> list[Exception]:
        """After a failure, release what was gathered and not awaited, which may wait for peers."""
        return _release(self._coming)


def _release(gathered: dict[int, WeightKeeper]) -> list[Exception]:
    failures: list[Exception] = []
    while gathered:
        _, keeper = gathered.popitem()
        try:
            keeper.release()
        except Exception as failure:
            failures.append(failure)
    return failures
