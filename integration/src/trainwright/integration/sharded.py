"""This rank's stages of the model, initialised, with their states shared out."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

import attrs
import torch
from torch import nn

from trainwright.checkpointing.activations import compose, parse_policy
from trainwright.collectives import ReduceOp
from trainwright.integration.chunks import Chunks, join, tie
from trainwright.integration.config import RunConfig
from trainwright.integration.model import (
    Block,
    DecoderStage,
    DenseBlock,
    ExpertBlock,
    ModelShape,
    TensorParallelLayers,
    attend_causally,
    build_stage,
    initializer,
)
from trainwright.integration.offloading import offload_of, space_for
from trainwright.integration.sequence_part import SequencePart
from trainwright.pipeline_schedules import Schedule
from trainwright.precision import policy
from trainwright.sharding import Mesh, Partial, placements_of
from trainwright.sharding.context import ContextLayout
from trainwright.sharding.data import DataParallel, ShardPolicy, by_class, data_parallel
from trainwright.sharding.expert import capture_routing
from trainwright.sharding.offload import Offload
from trainwright.sharding.tensor import SequenceSharding

EMBEDDING = "model.embed_tokens.weight"

KEEP_FP32 = ("*norm.weight",)
"""Norms stay in at least float32 whatever the dtype of the run."""

NORM_BIASES = "*norm.bias"
"""So do their biases, in models that have some."""

ROUTERS = "*.mlp.gate.weight"
"""So do routers."""

BUCKET_BYTES = 25 * 2**20
LIVE_UNITS = 2
REDUCE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""In what gradients travel; they are at least float32 where they lie."""


def build_stages(
    config: RunConfig, shape: ModelShape, mesh: Mesh, schedule: Schedule
) -> dict[int, DecoderStage]:
    """Build this rank's stages in master precision, without memory for their weights yet."""
    blocks = config.parallel.layers_of_stages(shape.layers)
    part = sequence_part(config, mesh)
    sequence = None
    if config.parallel.sequence_parallel:
        sequence = SequenceSharding.keeping_shards(length=part.length)
    attend = attend_causally if mesh.size("cp") == 1 else part.attention(config.parallel.context)
    layers = TensorParallelLayers(mesh, sequence, attend)
    kept = config.activations
    runner = compose(
        parse_policy(kept.recompute, agree=_agreement(config, mesh), captures=[capture_routing]),
        offload=kept.offload_activations,
        compress=kept.compress_activations,
    )
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    stages = {}
    with torch.device("meta"):
        for number in schedule.stages_of(mesh.coordinate("pp")):
            stages[number] = build_stage(shape, layers, blocks[number], runner).to(dtype=dtype)
    first, last = 0, schedule.num_stages - 1
    if shape.tied and first < last and {first, last} <= stages.keys():
        tie(stages[first], stages[last])
    return stages


def _agreement(config: RunConfig, mesh: Mesh) -> Callable[[list[int]], list[int]] | None:
    """Return what makes counts of layers the same on all ranks of a pipeline stage, the greatest.

    Layers differ between them, by uneven shares and by the tokens that experts are sent.
    """
    if not config.activations.recompute.startswith("budget"):
        return None
    ranks = mesh.communicator("dp", "cp", "tp")

    def agree(counts: list[int]) -> list[int]:
        greatest = torch.tensor(counts, dtype=torch.int64, device=ranks.device)
        ranks.all_reduce(greatest, ReduceOp.MAX).wait()
        return [int(count) for count in greatest.tolist()]

    return agree


def sequence_part(config: RunConfig, mesh: Mesh) -> SequencePart:
    """Return which positions of each sequence this rank has: all, without context parallelism."""
    layout = ContextLayout("zigzag", config.batch.sequence_length, config.parallel.mesh.cp)
    return SequencePart(layout, mesh.communicator("cp"))


def shard_model(
    config: RunConfig,
    shape: ModelShape,
    mesh: Mesh,
    stages: dict[int, DecoderStage],
    *,
    drawn: bool = True,
) -> Chunks:
    """Initialise stages and share their model states out over the data-parallel ranks.

    Without ``drawn`` all weights are zero, for somebody who loads them.

    Raises:
        ConfigError: on every rank: one of them has no space for what is offloaded.

    Communicates: what `data_parallel` does, and with ``--offload`` one all-reduce of 8 bytes.
    """
    groups = [[number] for number in stages]
    ends = [number for number, stage in stages.items() if stage.is_first or stage.is_last]
    if shape.tied and len(ends) == 2:
        # They share a weight, which is reduced once, after the last of its two uses.
        groups = [ends, *([number] for number in stages if number not in ends)]
    parallel = {}
    offload = offload_of(config, mesh.world)
    with space_for(config, offload, mesh.world):
        for group in groups:
            members = [stages[number] for number in group]
            module = members[0] if len(members) == 1 else join(members)
            model = _shard(config, shape, mesh, module, offload, len(members) == 2, drawn=drawn)
            parallel.update(dict.fromkeys(group, model))
    return Chunks(stages, {number: parallel[number] for number in stages}, offload)


def _shard(
    config: RunConfig,
    shape: ModelShape,
    mesh: Mesh,
    module: nn.Module,
    offload: Offload | None,
    shares_ends: bool,
    *,
    drawn: bool,
) -> DataParallel:
    placements = placements_of(module)
    if shape.tied and not shares_ends and mesh.size("pp") > 1 and EMBEDDING in placements:
        # The embedding lies at both ends of the pipeline, which see a part of its gradient each.
        alone = placements[EMBEDDING]
        placements[EMBEDDING] = attrs.evolve(alone, gradient={**alone.gradient, "pp": Partial()})
    parallel = config.parallel
    keep = [*KEEP_FP32]
    keep += [NORM_BIASES] if shape.norm == "layer" else []
    keep += [ROUTERS] if any(fnmatchcase(name, ROUTERS) for name in placements) else []
    dtypes = policy(config.dtype, keep_fp32=keep)
    dtypes.check_patterns(placements)
    return data_parallel(
        module,
        mesh,
        ShardPolicy(
            stage=parallel.zero,
            bucket_bytes=parallel.bucket_bytes or BUCKET_BYTES,
            live_units=parallel.live_units or LIVE_UNITS,
            reduce_dtype=REDUCE_DTYPES.get(parallel.reduce_dtype or ""),
            units=by_class(Block, DenseBlock, ExpertBlock),
            parameter_dtype=dtypes.parameter_dtype,
            reduce_each_backward=parallel.reduce == "microbatch",
            # Drawn by place they are equal already; a broadcast would hide it if they were not.
            broadcast_weights=False,
        ),
        placements,
        hooks=parallel.zero == 3 and not gathers_stages(config),
        initialize=initializer(placements, shape, config.seed) if drawn else _zero,
        offload=offload,
    )


@torch.no_grad()
def _zero(path: str, module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.zero_()


def gathers_stages(config: RunConfig) -> bool:
    """Whether the schedule gathers weights, a stage at a time, and not hooks, unit by unit."""
    parallel = config.parallel
    alone = parallel.gather == "auto" and parallel.num_stages == 1
    return parallel.zero == 3 and not alone and parallel.gather != "unit"
