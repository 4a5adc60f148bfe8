"""The settings of a run as one validated tree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from trainwright.integration.aside import write_aside
from trainwright.integration.errors import ConfigError
from trainwright.integration.settings import (
    ActivationSettings,
    BatchSettings,
    DataSettings,
    EvaluationSettings,
    GuardSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RateSettings,
    SavingSettings,
    ScalingSettings,
    WatchingSettings,
    tree,
)
from trainwright.integration.settings.batch import BatchSizes
from trainwright.integration.settings.files import MOST_BYTES, read_file
from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import not_negative, one_of, positive
from trainwright.precision import PRESETS

DTYPES = tuple(PRESETS)
SCALED = ("float16", "fp8-delayed")
"""Those dtypes whose runs keep scales from step to step."""


@attrs.frozen
class RunConfig:
    """Everything that decides what a training run computes.

    Sections hold the settings, each validated where it is made. No two have a setting of one name,
    so that `of`, `evolve` and the command line need no section.

    Args:
        steps: updates to make; a step whose update is skipped does not count, so that schedules
            reach their end and a run that skips a batch trains like one that never reads it. A
            resumed run counts from its beginning.
        seed: decides initial weights and sample order.
        dtype: of weights and compute; master weights and moments are at least float32. With
            ``float16`` losses are scaled, with ``fp8-…`` layers multiply FP8 operands in bfloat16.

    Raises:
        ConfigError: a value is of another kind, or out of its range.
    """

    steps: int = leaf(600, "updates to make; steps that are skipped do not count", positive)
    seed: int = leaf(0, "of initial weights and sample order", not_negative)
    dtype: str = leaf("float32", f"one of {', '.join(DTYPES)}", one_of(DTYPES))
    parallel: ParallelSettings = attrs.field(factory=ParallelSettings)
    batch: BatchSettings = attrs.field(factory=BatchSettings)
    model: ModelSettings = attrs.field(factory=ModelSettings)
    data: DataSettings = attrs.field(factory=DataSettings)
    optimizer: OptimizerSettings = attrs.field(factory=OptimizerSettings)
    scaling: ScalingSettings = attrs.field(factory=ScalingSettings)
    rate: RateSettings = attrs.field(factory=RateSettings)
    activations: ActivationSettings = attrs.field(factory=ActivationSettings)
    guards: GuardSettings = attrs.field(factory=GuardSettings)
    saving: SavingSettings = attrs.field(factory=SavingSettings)
    evaluation: EvaluationSettings = attrs.field(factory=EvaluationSettings)
    watching: WatchingSettings = attrs.field(factory=WatchingSettings)

    @property
    def sizes(self) -> BatchSizes:
        """The sizes of the global batch, those that were left to others among them.

        Raises:
            ConfigError: they do not multiply out.
        """
        mesh = self.parallel.mesh
        return self.batch.sizes(mesh.dp, mesh.pp)

    @classmethod
    def of(cls, **leaves: Any) -> RunConfig:
        """Return the default settings but for some leaves, such as ``of(layout="tp=2", steps=2)``.

        Raises:
            ConfigError: there is no such leaf (the nearest is named), or its value is not allowed.
        """
        return cls().evolve(**leaves)

    def evolve(self, **leaves: Any) -> RunConfig:
        """Return these settings but for some leaves.

        Raises:
            ConfigError: there is no such leaf (the nearest is named), or its value is not allowed.
        """
        return tree.evolve(self, leaves)

    def leaves(self) -> dict[str, Any]:
        """Return the values of all leaves by name."""
        return tree.values_of(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RunConfig:
        """Build the settings from plain values, nested in sections or, as names are unique, flat.

        Raises:
            ConfigError: a key is unknown (the nearest one is named with its section), or a value
                is not allowed.
        """
        return cls.of(**tree.flatten(cls, values))

    def text(self) -> str:
        """Return the settings as JSON, in sections."""
        return json.dumps(tree.nest(self), indent=2) + "\n"

    def save(self, path: Path) -> None:
        """Write the settings as JSON, aside and then renamed.

        Raises:
            ConfigError: they are longer than what `load` reads.
        """
        text = self.text()
        if (size := len(text.encode())) > MOST_BYTES:
            raise ConfigError(
                f"the settings take {size:,} bytes, and a run could not be resumed with more than "
                f"{MOST_BYTES:,}; name data in folders instead of file by file"
            )
        write_aside(path, text)

    @classmethod
    def read_leaves(cls, path: Path) -> dict[str, Any]:
        """Return the leaves that a TOML, YAML or JSON file sets, such as one that ``save`` wrote.

        Raises:
            ConfigError: the file cannot be read, names a key twice or one that is unknown, or a
                value is not allowed.
        """
        values = read_file(path)
        try:
            leaves = tree.flatten(cls, values)
            cls.of(**leaves)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        return leaves

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        """Read settings from a file; see `read_leaves`.

        Raises:
            ConfigError: what `read_leaves` says.
        """
        return cls.of(**cls.read_leaves(path))
