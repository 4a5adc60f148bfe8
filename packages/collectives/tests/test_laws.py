"""Every communicator obeys the laws of the protocol."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainwright.collectives import Communicator, LocalWorld, ReduceOp, SingleCommunicator
from trainwright.collectives.testing import COMMUNICATOR_LAWS, Case, Law, cases, some_cases


def names_of(law: Law) -> str:
    return law.__name__


@pytest.mark.parametrize("law", COMMUNICATOR_LAWS, ids=names_of)
@given(size=st.integers(1, 5), case=cases())
@example(size=3, case=Case((3,), torch.complex64, op=ReduceOp.AVG))
def test_rank_threads_obey(law: Law, size: int, case: Case) -> None:
    LocalWorld(size).run(law, case)


@pytest.mark.parametrize(("size", "step"), [(2, 1), (3, 1), (8, 4)])
def test_rank_threads_add_exactly_on_the_chosen_cases(size: int, step: int) -> None:
    def obey(comm: Communicator) -> None:
        for case in some_cases()[::-step]:
            for law in COMMUNICATOR_LAWS[:4]:
                law(comm, case)

    LocalWorld(size).run(obey)


@pytest.mark.parametrize("law", COMMUNICATOR_LAWS, ids=names_of)
@given(case=cases())
def test_a_communicator_of_one_obeys(law: Law, case: Case) -> None:
    law(SingleCommunicator(), case)
