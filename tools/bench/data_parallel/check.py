"""Before anything is timed: do all contestants train the same model?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch

from tools.bench.data_parallel.alone import Single
from tools.bench.data_parallel.contestants import Recipe, builders, take_step
from tools.bench.data_parallel.gpt import Batch, BatchShape, Shape, build_model
from trainwright.collectives import Communicator
from trainwright.sharding import NotAvailableError

TOLERANCE = 1e-5
"""Largest difference of a weight from that of one process on the batches of all ranks."""

_BATCH = BatchShape(1, 32)
# The first steps are not clipped, so that a gradient of the wrong size shows; the last one is.
_BOUNDS = (1e9, 1e9, 0.5)
_LR = 1.0
NOT_COMPARED = ("single", "floor")
"""They do not train on all ranks' batches."""


@attrs.frozen
class Agreement:
    """How far one contestant is from one process that trains on all batches.

    Args:
        error: largest difference of a weight.
        moved: largest change of a weight in the same steps; an error that is not far smaller than
            this would say nothing.
    """

    error: float
    moved: float

    @property
    def holds(self) -> bool:
        """Whether it trains the same model."""
        return self.error <= TOLERANCE < 1e-2 * self.moved


def check(
    world: Communicator, shape: Shape, names: Sequence[str]
) -> tuple[dict[str, Agreement], dict[str, str]]:
    """Train each contestant for three steps of plain SGD and compare all its weights.

    AdamW would hide a gradient of the wrong size.

    Returns:
        The agreement of each contestant on this rank, and why others are not available.
    """
    recipe = Recipe(shape, torch.optim.SGD, {"lr": _LR}, fuses=False)
    expected = _train_on_all(recipe, world.size)
    start = dict(build_model(shape).named_parameters())
    moved = _largest_difference(expected, start)
    found: dict[str, Agreement] = {}
    missing: dict[str, str] = {}
    for name in names:
        if name in NOT_COMPARED:
            continue
        try:
            contestant = builders()[name](world, recipe)
        except NotAvailableError as reason:
            missing[name] = str(reason)
            continue
        for step, bound in enumerate(_BOUNDS):
            take_step(contestant, _batches(shape, world.size, step)[world.rank], bound)
        error = _largest_difference(contestant.whole_weights(), expected)
        found[name] = Agreement(error, moved)
    return found, missing


def _train_on_all(recipe: Recipe, ranks: int) -> Mapping[str, torch.Tensor]:
    oracle = Single(recipe)
    for step, bound in enumerate(_BOUNDS):
        take_step(oracle, Batch.join(_batches(recipe.shape, ranks, step)), bound)
    return oracle.whole_weights()


def _batches(shape: Shape, ranks: int, step: int) -> list[Batch]:
    return [Batch.draw(shape, _BATCH, seed=1000 + step * ranks + rank) for rank in range(ranks)]


def _largest_difference(
    weights: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
) -> float:
    if weights.keys() != others.keys():
        return math.inf
    with torch.no_grad():
        differences = [float((weights[name] - others[name]).abs().max()) for name in others]
    # A comparison with NaN is never true, so max() might pass over one.
    return math.inf if any(map(math.isnan, differences)) else max(differences)
