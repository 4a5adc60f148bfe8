"""What watches the steps."""

from __future__ import annotations

import attrs

from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import positive


@attrs.frozen
class GuardSettings:
    """The guards.

    Args:
        guards: what watches the steps: ``default``, ``all``, ``none``, or a JSON file, see
            `read_guards`.
        exclude: a JSON file with positions of the sample order that are never read.
        qk_clip: largest attention logit of a head, whose weights are shrunk after an update in
            which it was greater; 100 in Kimi K2.
    """

    guards: str = leaf("default", "what watches the steps: default, all, none or a JSON file")
    exclude: str | None = leaf(None, "a JSON file with positions of the data that are never read")
    qk_clip: float | None = leaf(
        None, "largest attention logit of a head, whose weights are shrunk above it", positive
    )
