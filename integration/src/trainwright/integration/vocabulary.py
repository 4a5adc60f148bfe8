"""Model and tokenizer: as many tokens on both sides."""

from __future__ import annotations

import attrs

from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.model import PRESETS, ModelShape


def shape_for(config: RunConfig, vocabulary: int) -> ModelShape:
    """Return the sizes of the model that the settings name; a preset takes the tokenizer's tokens.

    Args:
        config: the settings.
        vocabulary: number of tokens of the data.

    Raises:
        ConfigError: the model knows fewer tokens.
    """
    shape = config.model.shape
    if config.model.model in PRESETS:
        return attrs.evolve(shape, vocabulary=vocabulary)
    check_vocabulary(shape, vocabulary, config.model.model)
    return shape


def check_vocabulary(shape: ModelShape, vocabulary: int, model: str) -> None:
    """Check that a model knows all tokens of the data; more do no harm.

    Raises:
        ConfigError: it knows fewer.
    """
    if shape.vocabulary < vocabulary:
        raise ConfigError(
            f"model {model} has a vocabulary of {shape.vocabulary}, and the tokenizer of the data "
            f"one of {vocabulary}; give the tokenizer that the model was made with, by --tokenizer"
        )
