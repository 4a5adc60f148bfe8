"""What turns gradients into updates."""

from __future__ import annotations

import attrs

from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import not_negative, positive


@attrs.frozen
class OptimizerSettings:
    """The optimizer.

    Args:
        lr: peak learning rate.
        weight_decay: of matrices; norms have none.
        clip: largest gradient norm.
    """

    lr: float = leaf(2e-3, "peak learning rate", positive)
    weight_decay: float = leaf(0.1, "decay of matrices", not_negative)
    clip: float = leaf(1.0, "largest gradient norm", positive)
