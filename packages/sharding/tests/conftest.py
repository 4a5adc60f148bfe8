"""Hypothesis profiles of this package's tests: reproducible in continuous integration."""

import os

from hypothesis import settings

settings.register_profile("dev", max_examples=15, deadline=None)
settings.register_profile("ci", max_examples=15, deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
