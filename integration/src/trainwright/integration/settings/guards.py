"""What watches the steps."""

from __future__ import annotations

import attrs

from trainwright.integration.settings.leaf import leaf


@attrs.frozen
class GuardSettings:
    """The guards.

    Args:
        guards: what watches the steps: ``default``, ``all``, ``none``, or a JSON file, see
            `read_guards`.
        exclude: a JSON file with positions of the sample order that are never read.
    """

    guards: str = leaf("default", "what watches the steps: default, all, none or a JSON file")
    exclude: str | None = leaf(None, "a JSON file with positions of the data that are never read")
