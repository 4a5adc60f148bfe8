"""Every reader of outside bytes in integration reads a damaged input, or refuses it in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import fuzz_data, fuzz_settings
from tests.fuzzing import PARTS, Reader, Summary, fuzz

READERS = {**fuzz_data.READERS, **fuzz_settings.READERS}
FEW = 30
"""Inputs a reader in the suite that runs by default."""


@pytest.mark.parametrize("name", READERS)
def test_a_few_damaged_inputs_are_read_or_refused(name: str) -> None:
    summary = fuzz(READERS[name](), FEW)
    assert summary.inputs == summary.accepted + sum(summary.refused.values())
    assert summary.accepted + sum(summary.refused.values()) > 0


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_inputs_are_read_or_refused(
    name: str, part: int, fuzz_part: Callable[[str, Reader, int], Summary]
) -> None:
    summary = fuzz_part(name, READERS[name](), part)
    assert summary.inputs == summary.accepted + sum(summary.refused.values())
