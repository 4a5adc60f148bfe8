"""Global batches that grow during a run, by the updates that were applied."""

from __future__ import annotations

import functools
from collections.abc import Callable

from trainwright.integration.config import RunConfig
from trainwright.integration.data import Batch
from trainwright.integration.errors import ConfigError
from trainwright.integration.feed import Feed, GlobalBatch
from trainwright.stability_guards import (
    BatchRamp,
    GuardError,
    Positions,
    fixed_batch,
    linear_ramp,
    stepwise_ramp,
)


def batch_ramp(config: RunConfig) -> BatchRamp:
    """Return the sizes of the global batches, in sequences, by the update.

    Microbatches keep their sequences, and data ranks make more of them.

    Raises:
        ConfigError: a size cannot be shared out, or they do not grow.
    """
    batch, sizes = config.batch, config.sizes
    if batch.ramp_from is None:
        return fixed_batch(sizes.global_batch)
    unit = config.parallel.mesh.dp * sizes.micro_batch
    for name, size in (("ramp-from", batch.ramp_from), ("ramp-by", batch.ramp_by or unit)):
        if size % unit:
            raise ConfigError(
                f"--{name} {size} must be a multiple of dp * micro_batch = {unit}; "
                f"{-(-size // unit) * unit} works"
            )
    over = batch.ramp_over
    assert over is not None, "the settings give both or none"
    try:
        if batch.ramp_by is None:
            return linear_ramp(batch.ramp_from, sizes.global_batch, over, unit)
        return stepwise_ramp(batch.ramp_from, sizes.global_batch, batch.ramp_by, over)
    except GuardError as error:
        raise ConfigError(f"--ramp-from {batch.ramp_from}: {error}") from error


def microbatch_counts(config: RunConfig) -> tuple[int, ...]:
    """Return the numbers of microbatches that a data rank makes of its shares, ascending."""
    unit = config.parallel.mesh.dp * config.sizes.micro_batch
    return tuple(sorted({size // unit for _, size in batch_ramp(config).stages}))


class RampedFeed(Feed):
    """A feed whose batches grow with the number of updates that were applied.

    A batch that is handed out counts as applied, unless ``discard_step`` says otherwise. Its
    ``sizes`` are those of the batch of an update with a number, not of one at a position.
    """

    _updates = 0
    _next = 0

    def next_batch(self) -> GlobalBatch:
        """Return the next batch and start on the one after it."""
        batch = super().next_batch()
        self._updates += 1
        return batch

    def seek(self, position: int, left_out: Positions) -> None:
        """Read on from ``position``, never any of ``left_out``; every rank calls it together."""
        self._next = self._updates
        super().seek(position, left_out)

    def discard_step(self) -> None:
        """Read the next batch as large as the last one, which was not applied."""
        self._updates -= 1
        self.seek(self.position, self.left_out)

    def count_from(self, updates: int) -> None:
        """Go on after so many updates, from the next ``seek`` on."""
        self._updates = updates

    def _draw(self) -> Callable[[], Batch]:
        assert self._sizes is not None, "a ramp says how large batches are"
        number = self._next
        self._next += 1
        return functools.partial(self._reader.read, self._reader.draw(*self._sizes(number)))


def ramped_sizes(config: RunConfig) -> Callable[[int], tuple[int, int]]:
    """Return the sequences of an update's global batch, and the microbatches of a rank's share."""
    ramp = batch_ramp(config)
    unit = config.parallel.mesh.dp * config.sizes.micro_batch

    def sizes(update: int) -> tuple[int, int]:
        size = ramp.size(update)
        return size, size // unit

    return sizes
