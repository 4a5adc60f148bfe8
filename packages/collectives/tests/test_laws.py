"""Every communicator obeys the laws of the protocol."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld, SingleCommunicator
from trainwright.collectives.testing import COMMUNICATOR_LAWS, Case, Law, cases, some_cases


def names_of(law: Law) -> str:
    return law.__name__


@pytest.mark.parametrize("law", COMMUNICATOR_LAWS, ids=names_of)
@given(size=st.integers(1, 5), case=cases())
def test_rank_threads_obey(law: Law, size: int, case: Case) -> None:
    LocalWorld(size).run(law, case)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_rank_threads_obey_all_laws_on_the_chosen_cases(size: int) -> None:
    def obey(comm):
        for case in some_cases():
            for law in COMMUNICATOR_LAWS[:4]:
                law(comm, case)

    LocalWorld(size).run(obey)


@pytest.mark.parametrize("law", COMMUNICATOR_LAWS, ids=names_of)
@given(case=cases())
def test_a_communicator_of_one_obeys(law: Law, case: Case) -> None:
    law(SingleCommunicator(), case)
