"""Memory where a communicator wants what travels on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.collectives import LocalWorld, Placing, Recorded, SingleCommunicator, empty_on


class Marking(SingleCommunicator):
    """Gives out memory that can be told from any other."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.given.append(torch.empty(tuple(shape), dtype=dtype))
        return self.given[-1]


def test_a_communicator_without_memory_of_its_own_takes_ordinary_tensors_of_its_device() -> None:
    comm = LocalWorld(1).run(lambda comm: comm)[0]

    made = empty_on(comm, (2, 3), dtype=torch.bfloat16)

    assert not isinstance(comm, Placing)
    assert (made.shape, made.dtype, made.device) == ((2, 3), torch.bfloat16, comm.device)


def test_memory_is_asked_of_the_innermost_communicator() -> None:
    inner = Marking()

    made = empty_on(Recorded(Recorded(inner)), (4,), dtype=torch.float64)

    assert len(inner.given) == 1
    assert made is inner.given[0]


def test_a_recorded_communicator_over_one_without_memory_of_its_own_gives_ordinary_tensors() -> (
    None
):
    made = empty_on(Recorded(SingleCommunicator()), (0, 5))

    assert (made.shape, made.dtype) == ((0, 5), torch.float32)
