"""What a run tells of itself while it goes on."""

from __future__ import annotations

import attrs

from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import not_negative

MEASUREMENTS, FARTHEST = 20, 500


@attrs.frozen
class WatchingSettings:
    """What is measured and shown.

    Args:
        measure_every: steps from one measurement of the ranks to the next, of their times, their
            memory and the pipeline; 0 for none. None makes about twenty, and one in 500 steps.
        tensorboard: whether TensorBoard's events are written to the run folder too.
    """

    measure_every: int | None = leaf(
        None,
        "steps between measurements of the ranks, 0 for none (default about 20 in all)",
        not_negative,
    )
    tensorboard: bool = leaf(False, "write TensorBoard's events to the run folder too")

    def every(self, steps: int) -> int:
        """Return how many steps lie between measurements of a run of so many; 0 for none."""
        if self.measure_every is None:
            return min(max(steps // MEASUREMENTS, 1), FARTHEST)
        return self.measure_every

    def is_measured(self, step: int, steps: int) -> bool:
        """Whether the ranks are measured at a step of a run of so many; on every rank alike."""
        every = self.every(steps)
        return every > 0 and step % every == 0

    def keeps_timeline(self, step: int, steps: int, end: int) -> bool:
        """Whether the timeline of a measured step is kept: at the 1st, 2nd, 4th, … and the last.

        Args:
            step: the measured one.
            steps: updates of the run, which say how often is measured.
            end: the last step, as far as is known: later than ``steps`` where some were skipped.
        """
        number = step // max(self.every(steps), 1)
        return number & (number - 1) == 0 or step + self.every(steps) > end
