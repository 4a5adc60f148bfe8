"""Laws of communicators, strategies for what ranks agree on, and real processes for tests."""

from trainwright.collectives.testing.processes import RemoteError, run_processes

__all__ = [
    "RemoteError",
    "run_processes",
]
