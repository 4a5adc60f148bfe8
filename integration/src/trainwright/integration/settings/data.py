"""What is read."""

from __future__ import annotations

import attrs

from trainwright.integration.settings.leaf import leaf


@attrs.frozen
class DataSettings:
    """The data.

    Args:
        data: a text file or a folder of them; None means the standard library's source files.
    """

    data: str | None = leaf(
        None, "a text file or a folder of them (default: Python's standard library)"
    )
