"""What is trained."""

from __future__ import annotations

from typing import Any

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.integration.model import PRESETS, ModelShape, preset
from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import positive, share


@attrs.frozen
class ModelSettings:
    """The model.

    Args:
        model: name of a model preset.
        qk_norm: whether queries and keys are normalised head by head, as in Qwen3.
        z_loss: what the square of the log of the softmax's normaliser counts in a token's loss, in
            training; 1e-4 in PaLM.
        embedding_gradient: share of the gradient that flows back into the embedding; 0.1 in
            GLM-130B.
        expert_bias: what the bias on each expert's score is moved by after each update, towards
            balance; 0.001 in DeepSeek-V3. None: there are no biases.

    Raises:
        ConfigError: the model has no experts to balance.
    """

    model: str = leaf("tiny", f"one of {', '.join(PRESETS)}")
    qk_norm: bool = leaf(False, "normalise queries and keys head by head")
    z_loss: float | None = leaf(None, "factor of the squared log-normaliser in the loss", positive)
    embedding_gradient: float | None = leaf(
        None, "share of the gradient that reaches the embedding", positive, share
    )
    expert_bias: float | None = leaf(
        None, "what biases of experts move by after each update, towards balance", positive
    )

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        return self.applied(preset(self.model))

    def applied(self, shape: ModelShape) -> ModelShape:
        """Return a shape with what the settings add to it."""
        changes: dict[str, Any] = {
            name: value
            for name in ("z_loss", "embedding_gradient")
            if (value := getattr(self, name)) is not None
        }
        if self.qk_norm:
            changes["qk_norm"] = True
        if self.expert_bias is not None:
            if shape.experts is None:
                raise ConfigError(
                    f"--expert-bias {self.expert_bias} balances experts, of which model "
                    f"{self.model} has none; --model tiny-moe has some"
                )
            routing = attrs.evolve(shape.experts.routing, biased=True)
            changes["experts"] = attrs.evolve(shape.experts, routing=routing)
        return attrs.evolve(shape, **changes)
