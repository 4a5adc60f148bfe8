"""A largest magnitude over the ranks that hold parts of one matrix."""

from __future__ import annotations

import math

import pytest
import torch

from trainwright.collectives import Communicator, LocalWorld
from trainwright.precision.float8.roles import largest_over


@pytest.mark.parametrize(
    ("found", "largest"),
    [
        ([1.0, 3.0, 2.0], 3.0),
        ([1.0, math.nan, 2.0], math.inf),
        ([math.nan, 3.0, math.inf], math.inf),
    ],
)
def test_a_part_that_is_not_finite_shows_in_the_maximum_of_every_rank(
    found: list[float], largest: float
) -> None:
    def run(comm: Communicator) -> float:
        own = torch.tensor(found[comm.rank])
        shared = largest_over(own, (comm,))
        # What a rank has found itself stays as it is.
        assert torch.equal(own, torch.tensor(found[comm.rank])) or own.isnan()
        return float(shared)

    assert LocalWorld(3).run(run) == [largest] * 3
