"""The settings of a run as one validated value, and what must fit together."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from trainwright.checkpointing.activations import parse_policy
from trainwright.integration.data.reader import check_batch
from trainwright.integration.errors import ConfigError
from trainwright.integration.model import ModelShape, preset
from trainwright.pipeline_schedules import GENERATORS
from trainwright.sharding import MeshShape

DTYPES = ("float32", "float64", "bfloat16")
SCHEDULES = tuple(name for name in GENERATORS if name != "forward-only")
ZERO_STAGES = (0, 1, 2, 3)
GATHERS = ("auto", "step", "action", "unit")
REDUCTIONS = ("step", "microbatch")


def _positive(_: Any, field: attrs.Attribute[Any], value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{_option(field.name)} must be positive and finite, got {value}")


def _not_negative(_: Any, field: attrs.Attribute[Any], value: float) -> None:
    if not 0 <= value < 2**63:
        raise ConfigError(
            f"{_option(field.name)} must not be negative, and below 2**63; got {value}"
        )


def _one_of(allowed: tuple[Any, ...]) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        if value not in allowed:
            near = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            known = ", ".join(str(a) for a in allowed)
            raise ConfigError(f"{_option(field.name)} must be one of {known}, got {value}{hint}")

    return check


@attrs.frozen
class RunConfig:
    """Everything that decides what a training run computes.

    Args:
        layout: sizes of the mesh axes, such as ``dp=2,tp=2,pp=2``.
        model: name of a model preset.
        data: a text file or a folder of them; None means the standard library's source files.
        steps: updates to make (a resumed run counts from its beginning).
        seed: decides initial weights and sample order.
        dtype: of weights and compute; master weights and moments are at least float32.
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
        zero: stage of sharded data parallelism.
        gather: when stage 3 makes weights whole: ``unit`` by unit around their use, a whole
            pipeline stage for the ``step`` or for each ``action``; ``auto`` is unit without a
            pipeline and step in one.
        reduce: whether gradients are added over data ranks once a ``step``, or after each
            ``microbatch``, so that stages 2 and 3 keep a part of them only.
        schedule: pipeline schedule.
        chunks: stages of the pipeline that each of its ranks holds; None for as many as the
            schedule has, 2 where any number works.
        recompute: ``none``, ``full`` or ``every-K`` layers.
        save_every: steps between checkpoints; 0 saves at the end only.
        keep: checkpoints of the run that stay, the last ones; None for all.
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
    steps: int = attrs.field(default=600, validator=_positive)
    seed: int = attrs.field(default=0, validator=_not_negative)
    dtype: str = attrs.field(default="float32", validator=_one_of(DTYPES))
    microbatches: int = attrs.field(default=2, validator=_positive)
    global_batch: int = attrs.field(default=16, validator=_positive)
    sequence_length: int = attrs.field(default=128, validator=_positive)
    lr: float = attrs.field(default=2e-3, validator=_positive)
    warmup: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_not_negative)
    )
    weight_decay: float = attrs.field(default=0.1, validator=_not_negative)
    clip: float = attrs.field(default=1.0, validator=_positive)
    sequence_parallel: bool = False
    zero: int = attrs.field(default=0, validator=_one_of(ZERO_STAGES))
    gather: str = attrs.field(default="auto", validator=_one_of(GATHERS))
    reduce: str = attrs.field(default="step", validator=_one_of(REDUCTIONS))
    schedule: str = attrs.field(default="1f1b", validator=_one_of(SCHEDULES))
    chunks: int | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))
    recompute: str = "none"
    save_every: int = attrs.field(default=0, validator=_not_negative)
    keep: int | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))
    keep_every: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_positive)
    )
    async_save: bool = False
    evaluate_sequences: int = attrs.field(default=512, validator=_positive)
    sample_bytes: int = attrs.field(default=200, validator=_not_negative)

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
            _check_kind(field.name, values.get(field.name, field.default), field.default)
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


def _check_kind(name: str, value: object, default: object) -> None:
    # The kinds are those of the defaults: text, whole numbers, numbers, or None.
    kinds: tuple[type, ...] = {int: (int,), float: (int, float)}.get(type(default), (str,))
    if default is None:
        kinds = (str if name == "data" else int, type(None))
    if isinstance(default, bool):
        kinds = (bool,)
    if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{name} must be {wanted}, got {value!r}")


def check_fits(shape: ModelShape, mesh: MeshShape, config: RunConfig) -> None:
    """Check that model, batch and layout divide as they must.

    Raises:
        ConfigError: naming the size that does not divide and the nearest values that work.
    """
    for axis in ("cp", "ep"):
        if getattr(mesh, axis) > 1:
            raise ConfigError(
                f"--layout {config.layout}: {axis} > 1 is not available yet; use {axis}=1"
            )
    for name in ("heads", "vocabulary", "mlp_width"):
        size = getattr(shape, name)
        if size < mesh.tp:
            raise ConfigError(
                f"--layout {config.layout}: tp={mesh.tp} ranks cannot share {name}={size} of model "
                f"{config.model}; tp up to {size} works"
            )
    _check_sequence(mesh, config)
    _check_pipeline(shape, mesh, config)
    check_batch(config.global_batch, mesh.dp, config.microbatches)
    _check_sharding(mesh, config)
    _check_saving(config)
    if config.warmup_steps > config.steps:
        raise ConfigError(
            f"--warmup {config.warmup} must be at most --steps {config.steps}, "
            "the last update of the run"
        )
    try:
        parse_policy(config.recompute)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"--recompute {config.recompute}: {error}") from error


def _check_pipeline(shape: ModelShape, mesh: MeshShape, config: RunConfig) -> None:
    only = GENERATORS[config.schedule].chunks
    if only is not None and config.chunks not in (None, only):
        raise ConfigError(
            f"--chunks {config.chunks}: schedule {config.schedule} has {only} a rank; "
            "interleaved-1f1b and breadth-first take any number"
        )
    stages = config.num_stages
    if stages > shape.layers:
        chunks = stages // mesh.pp
        counted = f"pp={mesh.pp}" if chunks == 1 else f"pp={mesh.pp} x {chunks} chunks"
        most = shape.layers // chunks
        way_out = f"pp up to {most} works" if most else f"--chunks up to {shape.layers} works"
        raise ConfigError(
            f"--layout {config.layout}: {counted} stages need at least as many layers, model "
            f"{config.model} has {shape.layers}; {way_out}"
        )


def _check_sharding(mesh: MeshShape, config: RunConfig) -> None:
    unused = {
        "--gather": config.gather != "auto" and config.zero < 3 and "stage 3 gathers weights",
        "--reduce": config.reduce != "step" and config.zero < 2 and "stages 2 and 3 cut gradients",
        "--layout dp_shard": mesh.dp_shard not in (None, mesh.dp)
        and config.zero < 1
        and "stages 1 to 3 share model states out",
    }
    for option, reason in unused.items():
        if reason:
            raise ConfigError(f"{option} has no effect with --zero {config.zero}; {reason}")


def _check_saving(config: RunConfig) -> None:
    every, kept = config.save_every, config.keep_every
    if not every and (kept or config.async_save):
        option = f"--keep-every {kept}" if kept else "--async-save"
        raise ConfigError(f"{option} has no effect with --save-every 0, which saves at the end")
    if kept and config.keep is None:
        raise ConfigError(
            f"--keep-every {kept} has no effect without --keep: all checkpoints stay; "
            "give --keep the number of the last ones that stay besides"
        )
    if kept and kept % every:
        below = kept // every * every
        nearest = f"{below} or {below + every}" if below else f"{every}"
        raise ConfigError(
            f"--keep-every {kept} must be a multiple of --save-every {every}; {nearest} works"
        )


def _check_sequence(mesh: MeshShape, config: RunConfig) -> None:
    if not config.sequence_parallel:
        return
    if mesh.tp == 1:
        raise ConfigError(
            f"--sequence-parallel has no effect with --layout {config.layout}: it cuts sequences "
            "over tensor-parallel ranks; set tp, or --no-sequence-parallel"
        )
    if config.sequence_length < mesh.tp:
        raise ConfigError(
            f"--sequence-parallel: --sequence-length {config.sequence_length} has fewer positions "
            f"than tp={mesh.tp} ranks"
        )


def _option(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")
