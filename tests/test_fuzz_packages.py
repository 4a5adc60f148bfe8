"""Every reader of outside bytes in the packages reads a damaged input, or refuses it by its errors.

The default suites try a few hundred inputs of each, ``nox -s fuzz`` 100,000
(``-- --fuzz-count N --fuzz-seed S`` for other ones), and print what became of them.
"""

from __future__ import annotations

import pytest

from tests import fuzz_checkpoints, fuzz_exchange, fuzz_plans, fuzz_states
from tests.fuzzing import PARTS, SAMPLE, fuzz

READERS = {
    **fuzz_checkpoints.READERS,
    **fuzz_exchange.READERS,
    **fuzz_plans.READERS,
    **fuzz_states.READERS,
}


@pytest.mark.parametrize("name", READERS)
def test_a_few_damaged_inputs_are_read_or_refused(name):
    summary = fuzz(READERS[name](), SAMPLE)
    assert summary.accepted > 0
    assert sum(summary.refused.values()) > 0


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_inputs_are_read_or_refused(name, part, fuzz_part):
    summary = fuzz_part(name, READERS[name](), part)
    assert summary.inputs == summary.accepted + sum(summary.refused.values())
