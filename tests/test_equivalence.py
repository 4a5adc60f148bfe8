"""The law over a pairwise-covering array of what a run can be told: layout, numbers, memory, …."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest
import torch

from tests.equivalence import table
from tests.equivalence.array import plain_rows, read_impossible, read_rows
from tests.equivalence.claims import assert_is_serial, first_weights, serial_run
from tests.equivalence.factors import FACTORS, MOST_RANKS, NEEDED, Row, refusal, world_size
from tests.equivalence.layout_runs import RankRun, joined, run_in_threads, run_rank
from trainwright.collectives import Communicator
from trainwright.collectives.shm import SharedMemoryCommunicator
from trainwright.collectives.testing import run_processes

ENTRIES = read_rows()
IMPOSSIBLE = read_impossible()
IN_PROCESSES = [entry for entry in ENTRIES if entry.processes]
PLAINEST = {name: values[0] for name, values in FACTORS.items()}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(e.row, id=e.name, marks=[] if e.sampled else [pytest.mark.long])
        for e in ENTRIES
    ],
)
def test_three_steps_of_a_row_are_the_serial_steps(row: Row) -> None:
    serial = serial_run(row)
    weights = first_weights(serial)

    run = run_in_threads(row, weights)

    assert_is_serial(row, serial, weights, run)


@pytest.mark.long
def test_a_step_of_sixty_four_ranks_in_one_process_is_the_serial_step() -> None:
    row = {
        **PLAINEST,
        **{"dp": "4", "tp": "4", "pp": "4", "sp": "yes", "zero": "3", "microbatches": "4"},
    }
    serial = serial_run(row)
    weights = first_weights(serial)

    run = run_in_threads(row, weights, steps=1)

    assert_is_serial(row, serial, weights, run)


def over_each(
    gloo: Communicator, row: Row, weights: Mapping[str, torch.Tensor]
) -> dict[str, RankRun]:
    """Run a row on this process over Gloo and then over shared memory."""
    worlds = {"gloo": gloo, "shm": SharedMemoryCommunicator()}
    return {name: run_rank(world, row, weights) for name, world in worlds.items()}


@pytest.mark.processes
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(e.row, id=e.name, marks=[pytest.mark.long] if number else [])
        for number, e in enumerate(IN_PROCESSES)
    ],
)
def test_three_steps_of_processes_over_gloo_and_over_shared_memory_are_the_serial_steps(
    row: Row,
) -> None:
    serial = serial_run(row)
    weights = first_weights(serial)

    ranks = run_processes(over_each, world_size(row), row, weights, timeout_s=150.0)

    for name in ("gloo", "shm"):
        assert_is_serial(row, serial, weights, joined([rank[name] for rank in ranks]))


def test_every_pair_of_values_is_in_a_row_or_is_refused() -> None:
    for one, other in itertools.combinations(FACTORS, 2):
        for value, another in itertools.product(FACTORS[one], FACTORS[other]):
            holds = any(e.row[one] == value and e.row[other] == another for e in ENTRIES)
            refused = ((one, value), (other, another)) in IMPOSSIBLE
            assert holds != refused, f"{one}={value}, {other}={another}: run `make` again"


def test_every_row_is_a_run_of_at_most_eight_ranks() -> None:
    for entry in ENTRIES:
        assert list(entry.row) == list(FACTORS)
        assert refusal(entry.row) is None
        assert world_size(entry.row) <= MOST_RANKS
    assert [entry.number for entry in ENTRIES] == list(range(1, len(ENTRIES) + 1))


def test_every_value_is_in_a_row_that_runs_by_default_and_in_one_of_a_dozen_of_processes() -> None:
    assert len(IN_PROCESSES) == 12
    for name, values in FACTORS.items():
        assert {entry.row[name] for entry in ENTRIES if entry.sampled} == set(values)
        assert len({entry.row[name] for entry in IN_PROCESSES}) > 1


def test_plain_values_of_factors_that_need_no_search_go_with_anything() -> None:
    for entry in ENTRIES:
        for name in FACTORS.keys() - set(NEEDED):
            assert refusal({**entry.row, name: PLAINEST[name]}) is None


def test_pairs_in_no_row_are_refused_whatever_else_is_chosen() -> None:
    draws = random.Random(0)
    for pair in IMPOSSIBLE:
        for _ in range(3):
            row = {name: draws.choice(values) for name, values in FACTORS.items()}
            assert refusal({**row, **dict(pair)}) is not None, f"{pair} in {row}"
        for entry in draws.sample(ENTRIES, 3):
            assert refusal({**entry.row, **dict(pair)}) is not None, f"{pair} in {entry.name}"


@pytest.mark.long
def test_pairs_in_no_row_are_refused_with_every_value_of_the_factors_that_let_others_in() -> None:
    for pair in IMPOSSIBLE:
        others = [name for name in NEEDED if name not in dict(pair)]
        for values in itertools.product(*(FACTORS[name] for name in others)):
            row = {**PLAINEST, **dict(zip(others, values, strict=True)), **dict(pair)}
            assert refusal(row) is not None, f"{pair} in {row}"


def test_pairs_in_no_row_are_listed_with_the_words_that_refuse_them() -> None:
    bases = [*plain_rows(), *(entry.row for entry in ENTRIES)]
    for pair, reason in IMPOSSIBLE.items():
        assert any(refusal({**base, **dict(pair)}) == reason for base in bases), pair


def test_the_readme_says_what_is_covered() -> None:
    covered = table.text(ENTRIES, IMPOSSIBLE)
    print(covered)
    assert table.written() == covered, "python -m tests.equivalence table writes it"
