"""Options of the tests of the whole."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tests import serial_runs

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
