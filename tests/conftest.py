"""Options of the tests of the whole."""

from __future__ import annotations

import os
from collections.abc import Callable

import attrs
import pytest
from hypothesis import HealthCheck, settings

from tests import serial_runs
from tests.faulting_session import (  # noqa: F401
    add_fault_options,
    book,
    fault_seed,
    print_faults,
    pytest_generate_tests,
    server,
    soak_minutes,
    undisturbed,
)
from tests.fuzz_table import table
from tests.fuzzing import PARTS, Reader, Summary, fuzz

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=10)
settings.register_profile(
    "dev", deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session", autouse=True)
def serial_runs_are_shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let the workers of this test run share the serial runs that they make."""
    own = tmp_path_factory.getbasetemp()
    serial_runs.folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what `nox -s fuzz -- …` and `nox -s faults -- …` may say."""
    add_fault_options(parser)
    group = parser.getgroup("fuzz", "damaged inputs for readers")
    group.addoption("--fuzz-count", type=int, default=100_000, help="inputs for each reader")
    group.addoption("--fuzz-seed", type=int, default=0, help="which inputs")


@pytest.fixture
def fuzz_part(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Callable[[str, Reader, int], Summary]:
    """Return what gives a reader its share of the inputs, one of `PARTS`, and keeps the summary."""
    count = request.config.getoption("--fuzz-count")
    seed = request.config.getoption("--fuzz-seed")

    def run(name: str, reader: Reader, part: int) -> Summary:
        first, stop = (count * place // PARTS for place in (part, part + 1))
        summary = fuzz(reader, stop - first, seed=seed, first=first)
        record_property("fuzz", [name, attrs.asdict(summary)])
        return summary

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what faults did to runs, and what readers did with damaged inputs."""
    print_faults(terminalreporter)
    properties = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for key, value in report.user_properties
        if key == "fuzz"
    ]
    if properties:
        terminalreporter.write_sep("=", "damaged inputs")
        terminalreporter.write_line(table(properties))
