"""A plugin of pytest that writes down why a test went red, for the runner of planted faults."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

WRITES_TO = "MUTANTS_WITNESS"
"""The environment variable that names the file, of which each line is one failure."""


def pytest_configure() -> None:
    """Leave out of Hypothesis's search what only makes a failing example smaller."""
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", settings.default, phases=phases)
    settings.load_profile("mutants")


def pytest_exception_interact(
    node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any], report: pytest.TestReport
) -> None:
    """Write the names of the errors behind a failure, and the first line of what it says."""
    if call.excinfo is None:
        return
    error = call.excinfo.value
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    line = {
        "test": node.nodeid,
        "while": report.when,
        "errors": sorted(_names(error)),
        "says": f"{type(error).__name__}: {said}"[:200],
    }
    with Path(os.environ[WRITES_TO]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _names(error: BaseException | None) -> set[str]:
    """Return the types of an error, of its causes and of the members of groups."""
    names: set[str] = set()
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        names.add(type(each).__name__)
        waiting += [each.__cause__, *getattr(each, "exceptions", ())]
    return names
