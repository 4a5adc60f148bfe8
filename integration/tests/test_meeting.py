"""Ranks that meet, and those that wait for one that does not come."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainwright.collectives import CollectiveTimeoutError
from trainwright.integration import meeting
from trainwright.integration.meeting import meet


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def test_ranks_have_one_store_once_all_of_them_are_there() -> None:
    with ThreadPoolExecutor(3) as threads:
        stores = list(threads.map(lambda rank: meet(rank, 3, 20.0), range(3)))

    stores[2].set("told", "by rank 2")
    assert [store.get("told") for store in stores] == [b"by rank 2"] * 3


def test_ranks_that_came_are_told_who_did_not() -> None:
    def come(rank: int) -> str:
        with pytest.raises(CollectiveTimeoutError) as caught:
            meet(rank, 4, 2.0 if rank else 0.2)
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(come, (0, 2))

    assert "rank 0 has waited 0.2 s to meet 4 ranks at localhost:" in first
    for said in (first, second):
        assert said.endswith(": missing: rank 1, rank 3")


def test_a_rank_whose_first_rank_is_not_there_says_where_it_looked() -> None:
    with pytest.raises(
        CollectiveTimeoutError, match=r"to meet 2 ranks at localhost:.* rank 0 must"
    ):
        meet(1, 2, 0.2)


def test_only_some_of_many_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_READING_S", 0.0)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 8, perhaps more$"):
        meet(0, 16384, 0.2)


def test_connecting_takes_of_the_time_in_which_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = meeting._store

    def connect_slowly(rank: int, timeout_s: float) -> meeting.Store:
        store = connect(rank, timeout_s)
        time.sleep(timeout_s)
        return store

    monkeypatch.setattr(meeting, "_store", connect_slowly)
    monkeypatch.setattr(meeting, "_READING_S", 0.0)
    monkeypatch.setattr(meeting, "_GRACE_S", 0.8)
    with pytest.raises(CollectiveTimeoutError, match=r"missing: rank 1$"):
        meet(0, 2, 1.0)
