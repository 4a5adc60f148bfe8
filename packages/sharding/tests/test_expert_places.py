"""Where tokens stand among those that an expert takes in turn, on ranks with unequally many."""

from __future__ import annotations

import pytest
import torch

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.expert.tokens import TokenCut
from trainwright.sharding.tensor import Cut, SequenceSharding


@pytest.mark.parametrize("length", [1, 7, 9])
@pytest.mark.parametrize("is_cut", [False, True])
def test_places_of_a_sequence_go_on_from_rank_to_rank_whatever_its_length(
    is_cut: bool, length: int
) -> None:
    def run(tp: Communicator) -> list[int]:
        sequence = SequenceSharding(length=length) if is_cut else None
        here = Cut.uneven(length, tp.size).sizes[tp.rank] if is_cut else length
        cut = TokenCut.of(torch.Size((1, here, 2)), tp, sequence)
        return cut.tokens(None, None, "sequence", torch.device("cpu")).place.tolist()

    ranks = LocalWorld(3).run(run)

    assert [place for places in ranks for place in places] == list(range(length))
