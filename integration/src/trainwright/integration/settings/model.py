"""What is trained."""

from __future__ import annotations

import attrs

from trainwright.integration.model import PRESETS, ModelShape, preset
from trainwright.integration.settings.leaf import leaf


@attrs.frozen
class ModelSettings:
    """The model.

    Args:
        model: name of a model preset.
    """

    model: str = leaf("tiny", f"one of {', '.join(PRESETS)}")

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        return preset(self.model)
