"""Hypothesis profiles: few examples, the same ones on every run of continuous integration."""

import os

from hypothesis import settings

settings.register_profile("default", max_examples=20, deadline=None)
settings.register_profile("ci", max_examples=20, deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
