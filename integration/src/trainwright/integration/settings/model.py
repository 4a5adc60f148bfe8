"""What is trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.integration.hugging_face.config import read_shape
from trainwright.integration.model import PRESETS, ModelShape, preset
from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import positive, share


def _to_name(model: Any) -> Any:
    """Return a folder's whole path, by which it is found from anywhere, and else the name."""
    is_folder = isinstance(model, str) and model not in PRESETS and os.path.isdir(model)
    return str(Path(model).resolve()) if is_folder else model


@attrs.frozen
class ModelSettings:
    """The model.

    Args:
        model: name of a model preset, or a folder of Hugging Face's libraries, whose config.json
            says the model and whose safetensors are the weights that the run begins with.
        model_config: a folder whose config.json says the model instead; a run keeps one of its own,
            so that it goes on when the folder has changed or gone.
        from_scratch: whether the run begins with random weights though the folder has some.
        qk_norm: whether queries and keys are normalised head by head, as in Qwen3.
        z_loss: what the square of the log of the softmax's normaliser counts in a token's loss, in
            training; 1e-4 in PaLM.
        embedding_gradient: share of the gradient that flows back into the embedding; 0.1 in
            GLM-130B.
        expert_bias: what the bias on each expert's score is moved by after each update, towards
            balance; 0.001 in DeepSeek-V3. None: there are no biases.

    Raises:
        ConfigError: the model has no experts to balance, or a preset would begin otherwise.
    """

    model: str = leaf(
        "tiny", f"one of {', '.join(PRESETS)}, or a Hugging Face folder", converter=_to_name
    )
    model_config: str | None = leaf(
        None, "folder whose config.json says the model (default: that of --model)"
    )
    from_scratch: bool = leaf(False, "begin with random weights, not with those of the folder")
    qk_norm: bool = leaf(False, "normalise queries and keys head by head")
    z_loss: float | None = leaf(None, "factor of the squared log-normaliser in the loss", positive)
    embedding_gradient: float | None = leaf(
        None, "share of the gradient that reaches the embedding", positive, share
    )
    expert_bias: float | None = leaf(
        None, "what biases of experts move by after each update, towards balance", positive
    )

    def __attrs_post_init__(self) -> None:
        if self.from_scratch and self.model in PRESETS:
            raise ConfigError(
                f"--from-scratch has no effect with --model {self.model}: presets have no weights"
            )
        if self.model_config is not None and self.model in PRESETS:
            raise ConfigError(
                f"--model-config {self.model_config} has no effect with --model {self.model}, a "
                "preset: leave one out"
            )

    @property
    def weights(self) -> Path | None:
        """The folder with the weights that a run begins with; None: they are drawn."""
        is_named = self.model in PRESETS or self.from_scratch
        return None if is_named else Path(self.model)

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        folder = self.model if self.model_config is None else self.model_config
        if self.model_config is not None or (os.path.isdir(folder) and folder not in PRESETS):
            return self.applied(read_shape(folder))
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
