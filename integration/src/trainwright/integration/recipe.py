"""Pre-training: one readable loop over parts that were chosen once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs

from trainwright.integration.feed import GlobalBatch
from trainwright.integration.flops import Spans
from trainwright.integration.parts import Parts, Progress
from trainwright.integration.recovering import guards_state, recovery_of
from trainwright.pipeline_schedules.execute import StepResult
from trainwright.sharding import StepTotals, one_norm
from trainwright.stability_guards import HaltError, Verdict, clip_

Observer = Callable[["StepRecord"], None]
"""Called on every rank after each step."""

MOST_SKIPPED = 1000
"""So many steps in a row without an update end a run: the next one would make none either."""


@attrs.frozen
class StepRecord:
    """What one step did.

    Args:
        step: number of steps made, this one included.
        end: number of the step that would be the last one, if no more are skipped.
        spans: all tokens of the global batch, targets or not, and how far they see; None where
            nobody says.
        loss: mean loss of the global batch's valid tokens, in nats.
        grad_norm: norm of the whole gradient before clipping.
        lr: learning rate of the update; zero where none was applied.
        tokens: valid tokens of the global batch.
        seconds: duration of the step on this rank.
        verdict: what the guards decided.
        skipped: whether no update was applied: by a verdict, or because gradients overflowed.
        microbatches: of each data rank; 0 where nobody says.
        pipeline: what the pipeline gave back on this rank, with its timeline at measured steps.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    verdict: Verdict
    skipped: bool = False
    microbatches: int = 0
    end: int = 0
    spans: Spans | None = None
    pipeline: StepResult | None = attrs.field(default=None, eq=False, repr=False)


def train(parts: Parts, progress: Progress, observers: Sequence[Observer] = ()) -> None:
    """Train until ``parts.steps`` updates are applied; ``progress`` says where to begin.

    It moves along with the steps, those among them that are skipped, and back where guards ask for
    a rollback. All ends earlier where the ranks agree to stop. As skipped steps do not count, a run
    makes the same updates whether it skips a batch, goes back and leaves it out, or never reads it.

    Raises:
        HaltError: the guards stopped the run, or `MOST_SKIPPED` steps in a row were skipped; every
            rank raises it at the same step.
        LossScaleError: gradients overflow at any loss scale; every rank raises it.

    Communicates: the pipeline's boundary tensors, the reduction of each gradient bucket, one
    float64 all-reduce over the world with norm, loss and token count, and what `ProductScales`
    says.
    """
    recovery = recovery_of(parts, progress)
    recovery.begin(progress.step)
    while progress.updates < parts.steps and not parts.stop.agreed:
        started = time.perf_counter()
        made = progress.step + 1
        batch = parts.feed.next_batch()
        parts.signals.listen(progress.step)
        scale = parts.scaler.get_scale()
        result = parts.executor_of(batch.microbatches).step(
            batch.inputs, divisor=batch.divisor, loss_scale=scale, timed=parts.is_measured(made)
        )
        parts.model.wait()
        totals = _summed(parts, batch, result)
        report = parts.stop.read(progress.step, totals, scale, parts.signals.heard())
        # Read where the host has waited anyway: later it would wait for the update too.
        spans = batch.spans()
        parts.scaler.unscale_(parts.optimizer, non_finite=totals.non_finite)
        verdict = recovery.judge(report, progress.updates)
        lr, skipped = _judged(verdict, parts, progress, totals)
        recovery.stepped(progress.step, verdict)
        progress.guard_state = guards_state(recovery, parts)
        record = StepRecord(
            step=made,
            loss=report.loss,
            grad_norm=report.norm,
            lr=lr,
            tokens=report.tokens,
            seconds=time.perf_counter() - started,
            verdict=verdict,
            skipped=skipped,
            microbatches=batch.microbatches,
            end=progress.end(parts.steps),
            spans=spans,
            pipeline=result,
        )
        for observe in observers:
            observe(record)


def _summed(parts: Parts, batch: GlobalBatch, result: StepResult) -> StepTotals:
    """Return norm, loss, tokens and verdict of all ranks."""
    return one_norm(
        parts.mesh,
        parts.model.pieces.values(),
        loss_sum=result.loss_sum,
        tokens=batch.tokens * parts.counts_tokens,
        verdict=parts.stop.level,
        num_verdicts=parts.stop.num_levels,
    )


def _judged(
    verdict: Verdict, parts: Parts, progress: Progress, totals: StepTotals
) -> tuple[float, bool]:
    """Do what was decided; return the update's learning rate, and whether it was skipped."""
    before = progress.skipped
    lr = _OUTCOMES[verdict](parts, progress, totals)
    parts.model.zero_grad()
    return lr, progress.skipped > before


def _apply(parts: Parts, progress: Progress, totals: StepTotals) -> float:
    lr = parts.learning_rate(progress.updates)
    pieces = parts.model.pieces.values()
    gradients = [grad for piece in pieces if (grad := piece.parameter.grad) is not None]
    clip_(gradients, parts.scaler.unscaled(totals.norm), parts.clip)
    parts.optimizer.set_rate(lr)
    parts.move_decay(progress.updates)
    if not parts.scaler.step(parts.optimizer):
        return _skip(parts, progress, totals)
    parts.scaler.update()
    parts.scales.end_step()
    parts.balance.end_step()
    parts.heads.end_step()
    parts.model.publish()
    progress.updates += 1
    progress.step += 1
    progress.in_a_row = 0
    return lr


def _skip(parts: Parts, progress: Progress, totals: StepTotals) -> float:
    parts.scales.discard_step()
    parts.balance.discard_step()
    parts.heads.discard_step()
    parts.feed.discard_step()
    if totals.non_finite:
        parts.scaler.update()
    else:
        # A step that is skipped for its data says nothing of the scale, which forgets it.
        parts.scaler.load_state_dict(parts.scaler.state_dict())
    progress.skipped += 1
    progress.step += 1
    progress.in_a_row += 1
    if progress.in_a_row >= MOST_SKIPPED:
        raise HaltError(
            f"step {progress.step}: {progress.in_a_row} steps in a row were skipped, and no update "
            "was applied; look at the data, or at what --guards says"
        )
    return 0.0


def _roll_back(parts: Parts, progress: Progress, totals: StepTotals) -> float:
    parts.heads.discard_step()
    return 0.0  # the recovery has put everything else back, `progress` too


_OUTCOMES: dict[Verdict, Callable[[Parts, Progress, StepTotals], float]] = {
    Verdict.CONTINUE: _apply,
    Verdict.SKIP: _skip,
    Verdict.ROLLBACK: _roll_back,
}
