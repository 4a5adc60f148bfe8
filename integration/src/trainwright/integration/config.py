"""The settings of a run as one validated value."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.integration.model import ModelShape, preset
from trainwright.integration.values import check_kind, not_negative, one_of, positive
from trainwright.pipeline_schedules import GENERATORS
from trainwright.precision import PRESETS
from trainwright.sharding import MeshShape

DTYPES = tuple(PRESETS)
SCALED = ("float16", "fp8-delayed")
"""Those dtypes whose runs keep scales from step to step."""
SCHEDULES = tuple(name for name in GENERATORS if name != "forward-only")
ZERO_STAGES = (0, 1, 2, 3)
GATHERS = ("auto", "step", "action", "unit")
REDUCTIONS = ("step", "microbatch")
CODECS = ("int8", "fp8", "bf16")
CONTEXTS = ("ring", "ulysses", "gathered", "hybrid")


@attrs.frozen
class RunConfig:
    """Everything that decides what a training run computes.

    Args:
        layout: sizes of the mesh axes, such as ``dp=2,tp=2,pp=2``.
        model: name of a model preset.
        data: a text file or a folder of them; None means the standard library's source files.
        steps: steps to make, those among them whose update is skipped (a resumed run counts from
            its beginning; it does not read again what it skipped).
        seed: decides initial weights and sample order.
        dtype: of weights and compute; master weights and moments are at least float32. With
            ``float16`` losses are scaled, with ``fp8-…`` layers multiply FP8 operands in bfloat16.
        microbatches: microbatches a data rank makes of its share of a global batch.
        global_batch: sequences a step over all data ranks.
        sequence_length: tokens a sequence.
        lr: peak learning rate.
        warmup: updates over which the learning rate rises; None takes 50, at most a quarter of
            the steps.
        weight_decay: of matrices; norms have none.
        clip: largest gradient norm.
        sequence_parallel: whether tensor-parallel ranks have a part of the positions each between
            their products, instead of all.
        context: how context-parallel ranks attend to each other's positions: keys and values go
            round a ``ring``, heads are exchanged (``ulysses``), all keys are ``gathered``, or
            heads are exchanged in rows and keys go round between these (``hybrid``).
        zero: stage of sharded data parallelism.
        gather: when stage 3 makes weights whole: ``unit`` by unit around their use, a whole
            pipeline stage for the ``step`` or for each ``action``; ``auto`` is unit without a
            pipeline and step in one.
        reduce: whether gradients are added over data ranks once a ``step``, or after each
            ``microbatch``, so that stages 2 and 3 keep a part of them only.
        schedule: pipeline schedule.
        chunks: stages of the pipeline that each of its ranks holds; None for as many as the
            schedule has, 2 where any number works.
        recompute: ``none``, ``full``, ``every-K`` layers, ``sqrt``, ``selective`` (all but matrix
            products) or ``budget:BYTES`` a microbatch and stage.
        offload_activations: where what backward needs waits: ``cpu``, or a folder that exists; None
            leaves it where it is.
        compress_activations: codec of what backward needs; None leaves it as it is. Gradients are
            then those of rounded activations.
        guards: what watches the steps: ``default``, ``none``, or a JSON file, see `read_guards`.
        exclude: a JSON file with positions of the sample order that are never read.
        save_every: steps between checkpoints; 0 saves at the end only.
        keep: checkpoints of the run that stay, the last ones; None for all. Of each snapshot that
            guards may go back to the last one before it stays as well.
        keep_every: steps whose checkpoints stay beside the last; None for no others.
        async_save: whether steps go on while a checkpoint is being written.
        evaluate_sequences: held-out sequences that are evaluated.
        sample_bytes: bytes of text generated at the end.

    Raises:
        ConfigError: a value is out of its range.
    """

    layout: str = "dp=1"
    model: str = "tiny"
    data: str | None = None
    steps: int = attrs.field(default=600, validator=positive)
    seed: int = attrs.field(default=0, validator=not_negative)
    dtype: str = attrs.field(default="float32", validator=one_of(DTYPES))
    microbatches: int = attrs.field(default=2, validator=positive)
    global_batch: int = attrs.field(default=16, validator=positive)
    sequence_length: int = attrs.field(default=128, validator=positive)
    lr: float = attrs.field(default=2e-3, validator=positive)
    warmup: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(not_negative)
    )
    weight_decay: float = attrs.field(default=0.1, validator=not_negative)
    clip: float = attrs.field(default=1.0, validator=positive)
    sequence_parallel: bool = False
    context: str = attrs.field(default="ring", validator=one_of(CONTEXTS))
    zero: int = attrs.field(default=0, validator=one_of(ZERO_STAGES))
    gather: str = attrs.field(default="auto", validator=one_of(GATHERS))
    reduce: str = attrs.field(default="step", validator=one_of(REDUCTIONS))
    schedule: str = attrs.field(default="1f1b", validator=one_of(SCHEDULES))
    chunks: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    recompute: str = "none"
    offload_activations: str | None = None
    compress_activations: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(one_of(CODECS))
    )
    guards: str = "default"
    exclude: str | None = None
    save_every: int = attrs.field(default=0, validator=not_negative)
    keep: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    keep_every: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(positive)
    )
    async_save: bool = False
    evaluate_sequences: int = attrs.field(default=512, validator=positive)
    sample_bytes: int = attrs.field(default=200, validator=not_negative)

    @property
    def mesh(self) -> MeshShape:
        """The layout as a mesh shape."""
        try:
            return MeshShape.parse(self.layout)
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"--layout {self.layout}: {error}") from error

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline over all of its ranks."""
        return self.mesh.pp * (self.chunks or GENERATORS[self.schedule].chunks or 2)

    @property
    def warmup_steps(self) -> int:
        """Updates over which the learning rate rises."""
        return min(50, self.steps // 4) if self.warmup is None else self.warmup

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        return preset(self.model)

    def save(self, path: Path) -> None:
        """Write the settings as JSON, aside and then renamed."""
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(attrs.asdict(self), indent=2) + "\n")
        aside.replace(path)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RunConfig:
        """Build the settings from plain values.

        Raises:
            ConfigError: a key is unknown (the nearest one is named) or a value is out of range.
        """
        known = [field.name for field in attrs.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"unknown setting {key!r}{hint}")
        for field in attrs.fields(cls):
            check_kind(field.name, values.get(field.name, field.default), field.default)
        return cls(**values)

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        """Read settings that ``save`` wrote.

        Raises:
            ConfigError: the file is missing or is not a JSON object.
        """
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the settings of a run from {path}: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a JSON object, got {type(values).__name__}")
        return cls.from_mapping(values)
