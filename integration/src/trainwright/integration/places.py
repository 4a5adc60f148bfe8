"""Where models are: the folder of a run, or one of Hugging Face's libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs

from trainwright.integration import hugging_face
from trainwright.integration.config import RunConfig
from trainwright.integration.data.learned import FILE, read_tokenizer
from trainwright.integration.data.manifest import MANIFEST, read_manifest
from trainwright.integration.data.tokenizer import ByteTokenizer, Tokenizer
from trainwright.integration.errors import ConfigError
from trainwright.integration.kept_origin import CONFIG, DATA, kept_origin
from trainwright.integration.loading import StandingModel, load_run, standing_settings
from trainwright.integration.model import PRESETS, ModelShape
from trainwright.integration.outside_files import read_object
from trainwright.integration.run_folder import IDENTITY, RunFolder

USUAL_LENGTH = 1024
"""Positions a sequence has where nothing says how many a model was trained with."""


class Place(Protocol):
    """A folder that holds a model."""

    @property
    def path(self) -> Path:
        """The folder."""
        ...

    def settings(self, given: Mapping[str, Any]) -> RunConfig:
        """Return the settings with which its model is looked at, but for the leaves given."""
        ...

    def shape(self) -> ModelShape:
        """Return the sizes of the model."""
        ...

    def tokenizer(self) -> Tokenizer:
        """Return what its tokens mean."""
        ...

    def ends(self) -> frozenset[int]:
        """Return the tokens that stand behind a text."""
        ...

    def origin(self) -> Path | None:
        """Return the folder of Hugging Face's libraries that the model began as, if it did."""
        ...

    def load(self, parts: StandingModel, step: int | None) -> str:
        """Load the weights; return which these are, for people."""
        ...


@attrs.frozen
class RunPlace:
    """The folder of a run, which may be under way."""

    path: Path

    def settings(self, given: Mapping[str, Any]) -> RunConfig:
        """Return those of the run that say what its model is and reads."""
        return standing_settings(self._stored(), given)

    def shape(self) -> ModelShape:
        """Return the sizes of the model; a preset has the tokenizer's tokens."""
        model = self._stored().model
        if model.model in PRESETS:
            return attrs.evolve(model.shape, vocabulary=self.tokenizer().vocabulary)
        return model.shape

    def tokenizer(self) -> Tokenizer:
        """Return the one that the run's data was prepared with."""
        prepared = self.path / DATA
        if (prepared / MANIFEST).is_file():
            return read_manifest(prepared).read_tokenizer(prepared)
        if (self.path / FILE).is_file():
            return read_tokenizer(self.path / FILE, self._stored().data.end_token)
        return ByteTokenizer()

    def ends(self) -> frozenset[int]:
        """Return the token behind documents."""
        return _end_of(self.tokenizer())

    def origin(self) -> Path | None:
        """Return the folder that the run was given as its model."""
        model = self._stored().model.model
        return kept_origin(self.path) or (None if model in PRESETS else Path(model))

    def load(self, parts: StandingModel, step: int | None) -> str:
        """Load a checkpoint."""
        return f"step {load_run(parts, RunFolder(self.path), step)} of {self.path}"

    def _stored(self) -> RunConfig:
        return RunFolder(self.path).config()


@attrs.frozen
class HuggingFacePlace:
    """A folder with a config.json and safetensors."""

    path: Path

    def settings(self, given: Mapping[str, Any]) -> RunConfig:
        """Return usual settings, with sequences as long as the model was trained for."""
        shape = self.shape()
        limits = (shape.max_positions, shape.window, USUAL_LENGTH)
        length = min(limit for limit in limits if limit is not None)
        usual = RunConfig.of(model=str(self.path), sequence_length=length)
        return standing_settings(usual, given)

    def shape(self) -> ModelShape:
        """Return what config.json says."""
        return hugging_face.read_shape(self.path)

    def tokenizer(self) -> Tokenizer:
        """Return that of ``tokenizer.json``; a model of 256 tokens without one reads bytes."""
        if not (self.path / FILE).is_file():
            bytes_are_tokens = ByteTokenizer()
            if self.shape().vocabulary == bytes_are_tokens.vocabulary:
                return bytes_are_tokens
        return read_tokenizer(self.path)

    def ends(self) -> frozenset[int]:
        """Return the tokenizer's, and those that the configurations name."""
        found = set(_end_of(self.tokenizer()))
        for name in (CONFIG, "generation_config.json"):
            found |= _named_ends(self.path / name)
        return frozenset(found)

    def origin(self) -> Path | None:
        """Return the folder itself."""
        return self.path

    def load(self, parts: StandingModel, step: int | None) -> str:
        """Load the safetensors, of which there is one state."""
        if step is not None:
            raise ConfigError(f"--step {step}: {self.path} is no run, and has no steps")
        world = parts.mesh.world
        loaded = hugging_face.load_(parts.model, self.shape(), self.path, world)
        if world.rank == 0:
            sys.stderr.write(f"{self.path}: {loaded}\n")
        return str(self.path)


def open_place(path: Path) -> Place:
    """Return what a folder holds.

    Raises:
        ConfigError: neither a run nor a model of Hugging Face's libraries.
    """
    if os.path.isfile(path / IDENTITY):
        return RunPlace(path)
    if os.path.isfile(path / CONFIG):
        return HuggingFacePlace(path)
    raise ConfigError(
        f"{path} holds no model: neither the {IDENTITY} of a run, nor the {CONFIG} of a model of "
        "Hugging Face's libraries"
    )


def _end_of(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset() if tokenizer.end is None else frozenset({tokenizer.end})


def _named_ends(path: Path) -> set[int]:
    try:
        values = read_object(path)
    except FileNotFoundError:
        return set()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    named = values.get("eos_token_id")
    tokens = named if isinstance(named, list) else [named]
    return {token for token in tokens if type(token) is int}
