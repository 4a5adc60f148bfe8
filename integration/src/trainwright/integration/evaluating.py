"""The held-out loss while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

from trainwright.integration.recipe import StepRecord
from trainwright.stability_guards import Verdict


@attrs.frozen(eq=False)
class EvaluateEvery:
    """Observes the steps and evaluates after every so many, but the last, which is anyway.

    The state of the run stays as it is, bit for bit.

    Args:
        every: steps from one evaluation to the next; 0 for none.
        evaluate: returns the held-out loss; every rank calls it together.
        tell: is told step, loss and seconds.
    """

    every: int
    evaluate: Callable[[], float]
    tell: Callable[[int, float, float], None]

    def __call__(self, record: StepRecord) -> None:
        """Evaluate if the step is due; one that was taken back is not."""
        if not self.every or record.step % self.every or record.step >= record.end:
            return
        if record.verdict is Verdict.ROLLBACK:
            return
        started = time.perf_counter()
        loss = self.evaluate()
        self.tell(record.step, loss, time.perf_counter() - started)
