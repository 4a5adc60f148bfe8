"""How ranks share the work."""

from __future__ import annotations

import itertools
from typing import Any

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import one_of, positive
from trainwright.pipeline_schedules import GENERATORS, split_layers
from trainwright.sharding import MeshShape

SCHEDULES = tuple(name for name in GENERATORS if name != "forward-only")
ZERO_STAGES = (0, 1, 2, 3)
GATHERS = ("auto", "step", "action", "unit")
REDUCE_DTYPES = ("bfloat16", "float16")
REDUCTIONS = ("step", "microbatch")
CONTEXTS = ("ring", "ulysses", "gathered", "hybrid")
OFFLOADS = ("none", "optimizer", "parameters")
NVME = "nvme:"
"""Begins an offload to a folder."""


def _offload(_: Any, field: attrs.Attribute[Any], value: str) -> None:
    if value in OFFLOADS or (value.startswith(NVME) and value != NVME):
        return
    folder = "; name a folder, such as nvme:/local/disk" if value.startswith("nvme") else ""
    raise ConfigError(
        f"--offload must be one of {', '.join(OFFLOADS)}, nvme:DIR, got {value}{folder}"
    )


@attrs.frozen
class ParallelSettings:
    """The layout of ranks, and what each axis of it does.

    Args:
        layout: sizes of the mesh axes, such as ``dp=2,tp=2,pp=2``.
        zero: stage of sharded data parallelism.
        gather: when stage 3 makes weights whole: ``unit`` by unit around their use, a whole
            pipeline stage for the ``step`` or for each ``action``; ``auto`` is unit without a
            pipeline and step in one.
        reduce: whether gradients are added over data ranks once a ``step``, or after each
            ``microbatch``, so that stages 2 and 3 keep a part of them only.
        reduce_dtype: in what gradients travel; None sends them as they are.
        overlap: whether reductions begin while the last backward is under way.
        bucket_bytes: gradients that are reduced at once below stage 3; None takes 25 MiB.
        live_units: at stage 3, units whose weights are whole at once; None takes 2.
        offload: what is kept in host memory: ``none``, the ``optimizer``'s states, or at stage 3
            ``parameters`` too; with ``nvme:DIR`` states, and at stage 3 weights, are in a file
            without a name there.
        sequence_parallel: whether tensor-parallel ranks have a part of the positions each between
            their products, instead of all.
        context: how context-parallel ranks attend to each other's positions: keys and values go
            round a ``ring``, heads are exchanged (``ulysses``), all keys are ``gathered``, or
            heads are exchanged in rows and keys go round between these (``hybrid``).
        schedule: pipeline schedule.
        chunks: stages of the pipeline that each of its ranks holds; None for as many as the
            schedule has, 2 where any number works.
        first_stage_layers: layers of the pipeline's first stage, which also embeds tokens; None
            shares layers out evenly.
        last_stage_layers: layers of its last, which also has the head.
    """

    layout: str = leaf("dp=1", "mesh sizes, such as dp=2,tp=2,pp=2")
    zero: int = leaf(0, f"sharded data parallelism, one of {ZERO_STAGES}", one_of(ZERO_STAGES))
    gather: str = leaf(
        "auto", f"when stage 3 gathers weights: {', '.join(GATHERS)}", one_of(GATHERS)
    )
    reduce: str = leaf(
        "step", f"when gradients are reduced: {', '.join(REDUCTIONS)}", one_of(REDUCTIONS)
    )
    reduce_dtype: str | None = leaf(
        None,
        f"in what gradients travel: {', '.join(REDUCE_DTYPES)} (default: as they are)",
        one_of(REDUCE_DTYPES),
    )
    overlap: bool = leaf(True, "begin reductions while the last backward is under way (default)")
    bucket_bytes: int | None = leaf(
        None, "gradients reduced at once below stage 3 (default 25 MiB)", positive
    )
    live_units: int | None = leaf(
        None, "layers whose weights are whole at once at stage 3 (default 2)", positive
    )
    offload: str = leaf(
        "none",
        f"what host memory keeps: {', '.join(OFFLOADS)}; nvme:DIR: a file there does",
        _offload,
    )
    sequence_parallel: bool = leaf(False, "cut positions between products over tp")
    context: str = leaf("ring", f"attention over cp: {', '.join(CONTEXTS)}", one_of(CONTEXTS))
    schedule: str = leaf("1f1b", f"one of {', '.join(SCHEDULES)}", one_of(SCHEDULES))
    chunks: int | None = leaf(
        None, "stages a pipeline rank, where the schedule leaves a choice (default 2)", positive
    )
    first_stage_layers: int | None = leaf(
        None, "layers of a pipeline's first stage (default: an even share)", positive
    )
    last_stage_layers: int | None = leaf(
        None, "layers of a pipeline's last stage (default: an even share)", positive
    )

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

    def layers_of_stages(self, num_layers: int) -> list[range]:
        """Return the layers of each stage of the pipeline.

        Stages whose layers are not set share the others out evenly; of two stages both are set, or
        none: a number that was meant for a longer pipeline would leave the other one the rest.

        Raises:
            ConfigError: numbers that are set do not leave a layer for every other stage, or are of
                one of two stages.
        """
        stages, first, last = self.num_stages, self.first_stage_layers, self.last_stage_layers
        if first is None and last is None:
            return split_layers(num_layers, stages)
        if stages == 2 and (first is None or last is None):
            raise ConfigError(_half_said(num_layers, first, last))
        others = stages - (first is not None) - (last is not None)
        left = num_layers - (first or 0) - (last or 0)
        if stages < 2 or left < others or (left > 0 and others == 0):
            raise ConfigError(_does_not_add_up(num_layers, stages, first, last))
        sizes = [len(each) for each in split_layers(left, others)] if others else []
        sizes = [*([first] if first else []), *sizes, *([last] if last else [])]
        starts = [sum(sizes[:stage]) for stage in range(stages + 1)]
        return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def _half_said(num_layers: int, first: int | None, last: int | None) -> str:
    size = last if first is None else first
    said, other = ("last", "first") if first is None else ("first", "last")
    rest = num_layers - (size or 0)
    set_too = f"set --{other}-stage-layers {rest} too, or " if rest > 0 else ""
    return (
        f"--{said}-stage-layers {size} of two stages: {size} + {other} must equal {num_layers}, "
        f"the layers of the model; {set_too}leave it out for even shares"
    )


def _does_not_add_up(num_layers: int, stages: int, first: int | None, last: int | None) -> str:
    named = {"--first-stage-layers": first, "--last-stage-layers": last}
    given = " + ".join(f"{name} {size}" for name, size in named.items() if size is not None)
    if stages < 2:
        return f"{given}: one stage has all {num_layers} layers; leave it out, or set pp"
    others = stages - given.count("--")
    if not others:
        return f"{given} must equal the {num_layers} layers of the model, which has two stages"
    return (
        f"{given} leave {num_layers - (first or 0) - (last or 0)} of the {num_layers} layers for "
        f"the other {others} of {stages} stages, which need one each"
    )
