"""The optimizer of a model whose states are offloaded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.optimizers import NOT_ELEMENT_WISE
from trainwright.sharding.data.whole_matrices import WholeMatrices
from trainwright.sharding.errors import NotAvailableError, ShardingError
from trainwright.sharding.offload import Offload, OffloadedStep, StepUnit


def offloaded_step(
    optimizer: torch.optim.Optimizer, parallels: Iterable[DataParallel], offload: Offload
) -> OffloadedStep:
    """Return what steps an optimizer over the pieces of models that were made with ``offload``.

    Its ``step()`` takes the place of the optimizer's, with the same results.

    Args:
        optimizer: Built on the pieces, element-wise.
        parallels: The models, on all ranks alike.
        offload: Keeps their states.

    Raises:
        ShardingError: There is no model, or the optimizer has parameters that are not offloaded.
        NotAvailableError: The optimizer is not element-wise, or changes its options as it steps.
        OffloadError: On every rank: one of them has no space for the states.

    Communicates:
        One all-reduce of 8 bytes over the world.
    """
    models = list(parallels)
    if not models:
        raise ShardingError("offloaded_step() needs at least one model")
    if isinstance(optimizer, WholeMatrices):
        raise NotAvailableError(
            "WholeMatrices updates whole parameters, and offloaded states are parts of them; "
            "offload element-wise optimizers only"
        )
    for known, why in NOT_ELEMENT_WISE.items():
        if isinstance(optimizer, known):
            raise NotAvailableError(
                f"{type(optimizer).__name__} {why}, and offloaded states are parts of parameters; "
                "take an element-wise optimizer, such as AdamW"
            )
    units: list[StepUnit] = [
        bucket.weights.away
        for model in models
        for unit in model.units.values()
        for bucket in unit.buckets
        if bucket.weights.away is not None and bucket.weights.away.is_trained
    ]
    return OffloadedStep(optimizer, units, offload.states, models[0].mesh.world)
