"""Hypothesis profiles: short by default, repeatable in continuous integration."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("default", max_examples=30, deadline=None)
settings.register_profile("ci", max_examples=30, deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
