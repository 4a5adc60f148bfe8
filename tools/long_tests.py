"""Which tests run where nothing is said: those that are not long. Conftests import the hook."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long tests out unless an expression given by -m asks for them."""
    if config.option.markexpr:
        return
    kept = [item for item in items if item.get_closest_marker("long") is None]
    left_out = [item for item in items if item.get_closest_marker("long") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
