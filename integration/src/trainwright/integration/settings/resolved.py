"""What follows from the settings, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.flops import Products, flops_per_token
from trainwright.integration.model import ModelShape
from trainwright.integration.rates import learning_rate
from trainwright.integration.values import counted

_MOST_COMPARED = 1000


def resolved(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Yield a line on each number that follows from others.

    Args:
        config: the settings.
        shape: the model's, with the tokenizer's tokens.

    Raises:
        ConfigError: the settings do not fit together.
    """
    parallel, mesh, sizes = config.parallel, config.parallel.mesh, config.sizes
    flops = flops_per_token(Products.of(shape), config.batch.sequence_length)
    yield (
        f"model {config.model.model}: {shape.num_parameters:,} parameters, "
        f"{flops / 1e6:,.1f} MFLOPs a token of whole sequences"
    )
    yield (
        f"layout {parallel.layout}: {counted(mesh.world_size, 'rank')}, ZeRO stage {parallel.zero}"
        + (f", schedule {parallel.schedule}" if mesh.pp > 1 else "")
    )
    yield (
        f"global batch {sizes.global_batch} = {counted(sizes.microbatches, 'microbatch', 'es')} of "
        f"{counted(sizes.micro_batch, 'sequence')} on {_each_of(mesh.dp, 'data rank')}"
    )
    if config.batch.ramp_from is not None:
        yield (
            f"global batches grow from {config.batch.ramp_from} to {sizes.global_batch} over "
            f"{config.batch.ramp_over} sequences of applied updates"
        )
    if config.rate.scheduler is None:
        rising = config.rate.warmup_steps(config.steps)
        yield f"the learning rate rises for {rising} of {counted(config.steps, 'update')}"
    else:
        yield f"learning rate by {config.rate.scheduler}"
    if parallel.num_stages > 1:
        stages = parallel.layers_of_stages(config.model.shape.layers)
        yield f"layers of the pipeline's stages: {[len(each) for each in stages]}"


def saved_where(config: RunConfig, folder: object) -> str:
    """Return a line on when checkpoints are written, and where they are.

    Args:
        config: the settings.
        folder: of the checkpoints.
    """
    saving = config.saving
    when = "a checkpoint at the end"
    if saving.save_every:
        when = f"checkpoints every {counted(saving.save_every, 'step')} and at the end"
    stay = []
    if saving.keep is not None:
        stay = [f"of which the last {saving.keep} stay", "one before each snapshot of the guards"]
    if saving.keep_every is not None:
        stay.append(f"those of every {saving.keep_every} steps")
    return f"{', '.join([when, *stay])}: {folder}"


def stretched(before: RunConfig, after: RunConfig) -> str | None:
    """Return a line on learning rates that another number of steps moves; None where it does not.

    Args:
        before: the settings of a run.
        after: those with which it goes on.
    """
    if before.steps == after.steps:
        return None
    try:
        old, new = (learning_rate(c.rate, c.optimizer.lr, c.steps) for c in (before, after))
    except ConfigError:
        return None  # what does not fit is refused in other words
    shared = min(before.steps, after.steps)
    looked_at = range(0, shared, max(1, shared // _MOST_COMPARED))
    moved = [at for at in looked_at if not math.isclose(old(at), new(at), rel_tol=1e-9)]
    if not moved:
        return None
    update = moved[-1]  # the nearest to where the run goes on
    rise, fall = (f(before.steps) for f in (before.rate.warmup_steps, before.rate.falling_steps))
    keep = ""
    if before.rate == after.rate and before.rate.scheduler is None:
        keep = f"; --warmup {rise} --decay-steps {fall} keeps the one it had"
    return (
        f"--steps {after.steps}, where the run had {before.steps}, moves its learning rate: of "
        f"update {update + 1} it is {new(update):.3g}, and was {old(update):.3g}{keep}"
    )


def _each_of(number: int, name: str) -> str:
    return f"each of {counted(number, name)}" if number > 1 else f"one {name}"
