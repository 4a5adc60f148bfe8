"""What follows from the settings, in words."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.integration.config import RunConfig


def resolved(config: RunConfig) -> Iterator[str]:
    """Yield a line on each number that follows from others.

    Raises:
        ConfigError: the settings do not fit together.
    """
    mesh, sizes = config.parallel.mesh, config.sizes
    yield (
        f"global batch {sizes.global_batch} = {sizes.microbatches} microbatches of "
        f"{sizes.micro_batch} sequences on each of {mesh.dp} data ranks"
    )
    if config.batch.ramp_from is not None:
        yield (
            f"global batches grow from {config.batch.ramp_from} to {sizes.global_batch} over "
            f"{config.batch.ramp_over} sequences of applied updates"
        )
    if config.rate.scheduler is None:
        rising = config.rate.warmup_steps(config.steps)
        yield f"the learning rate rises for {rising} of {config.steps} updates"
    else:
        yield f"learning rate by {config.rate.scheduler}"
    if config.parallel.num_stages > 1:
        stages = config.parallel.layers_of_stages(config.model.shape.layers)
        yield f"layers of the pipeline's stages: {[len(each) for each in stages]}"
