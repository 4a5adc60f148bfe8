"""Every communicator obeys the laws of the protocol."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainwright.collectives import Communicator, LocalWorld, ReduceOp, SingleCommunicator
from trainwright.collectives.testing import (
    COMMUNICATOR_LAWS,
    LAWS_ABOUT_SHAPES,
    Case,
    Law,
    cases,
    some_cases,
)

ABOUT_SHAPES = sorted(LAWS_ABOUT_SHAPES, key=COMMUNICATOR_LAWS.index)
OTHERS = [law for law in COMMUNICATOR_LAWS if law not in LAWS_ABOUT_SHAPES]


def name_of(law: Law) -> str:
    return law.__name__


@pytest.mark.parametrize("law", ABOUT_SHAPES, ids=name_of)
@given(size=st.integers(1, 5), case=cases())
@example(size=3, case=Case((3,), torch.complex64, op=ReduceOp.AVG))
def test_rank_threads_obey_for_all_shapes(law: Law, size: int, case: Case) -> None:
    LocalWorld(size).run(law, case)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("law", OTHERS, ids=name_of)
def test_rank_threads_obey(law: Law, size: int) -> None:
    for case in some_cases()[size::35]:
        LocalWorld(size).run(law, case)


@pytest.mark.parametrize(("size", "step"), [(2, 2), (3, 1), (8, 6)])
def test_rank_threads_add_exactly_on_the_chosen_cases(size: int, step: int) -> None:
    def obey(comm: Communicator) -> None:
        for case in some_cases()[::-step]:
            for law in COMMUNICATOR_LAWS[:4]:
                law(comm, case)

    LocalWorld(size).run(obey)


@pytest.mark.parametrize("law", COMMUNICATOR_LAWS, ids=name_of)
def test_a_communicator_of_one_obeys(law: Law) -> None:
    for case in some_cases()[:: 2 if law in LAWS_ABOUT_SHAPES else 35]:
        law(SingleCommunicator(), case)
