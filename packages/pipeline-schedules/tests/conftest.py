"""Hypothesis profiles: short by default, repeatable in continuous integration."""

from __future__ import annotations

import os

from hypothesis import settings

from tools.long_tests import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems"]

settings.register_profile("default", max_examples=30, deadline=None)
settings.register_profile("ci", max_examples=30, deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
