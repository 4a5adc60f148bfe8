"""What the memory model has to know of a run: sizes, formats, and which rank holds what."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.model import ModelShape
from trainwright.integration.settings.parallel import NVME
from trainwright.integration.sharded import BUCKET_BYTES
from trainwright.pipeline_schedules import Schedule
from trainwright.precision import policy
from trainwright.sharding.memory import (
    Away,
    BucketStates,
    BytesPerParameter,
    ExpertSizes,
    LatentSizes,
    Sharing,
    Slice,
    TransformerShape,
    buckets_of,
    parameters_of,
    slices_of,
)

MOMENTS = {"adamw": 2, "adam": 2, "sgd": 1, "lion": 1}
"""Tensors of an element-wise optimizer that are as large as the weights."""

COUNTED = ("adamw", "adam")
"""Those that also count their steps, once a piece."""

_STEP_BYTES = 4


def sizes_of(shape: ModelShape) -> TransformerShape:
    """Return the sizes of a model of this package."""
    experts = latent = None
    if shape.experts is not None:
        routing = shape.experts.routing
        experts = ExpertSizes(
            number=routing.num_experts,
            width=shape.experts.width,
            top_k=routing.top_k,
            shared_width=shape.experts.shared_width or 0,
            shared_gate=shape.experts.shared_gate,
            biased=routing.biased,
        )
    if shape.latent is not None:
        made = shape.latent
        latent = LatentSizes(made.keys, made.plain, made.turned, made.values, made.queries or 0)
    return TransformerShape(
        vocabulary=shape.vocabulary,
        width=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        mlp_width=shape.mlp_width,
        head_width=shape.head_width,
        gated=shape.gated,
        tied=shape.tied,
        norm_vectors=1 if shape.norm == "rms" else 2,
        position_rows=(shape.max_positions or 0) if shape.positions == "learned" else 0,
        qkv_bias=shape.qkv_bias,
        output_bias=shape.output_bias,
        mlp_bias=shape.mlp_bias,
        qk_norm=shape.qk_norm,
        experts=experts,
        dense_layers=shape.dense_layers,
        latent=latent,
    )


def bytes_of(config: RunConfig) -> BytesPerParameter:
    """Return what a parameter takes in a run.

    Raises:
        ConfigError: the optimizer's states are not in proportion to the weights.
    """
    settings = config.optimizer
    if settings.optimizer not in MOMENTS:
        raise ConfigError(
            f"--optimizer {settings.optimizer}: states of whole matrices are not estimated; "
            f"{', '.join(MOMENTS)} are"
        )
    weights = policy(config.dtype).parameter.itemsize
    master = max(weights, torch.float32.itemsize)
    moments = MOMENTS[settings.optimizer]
    if settings.optimizer == "sgd" and settings.momentum == 0.0:
        moments = 0
    return BytesPerParameter(
        weights=weights,
        gradients=master,
        masters=0 if master == weights else master,
        states=moments * master,
        per_piece=_STEP_BYTES if settings.optimizer in COUNTED else 0,
    )


def sharing_of(config: RunConfig) -> Sharing:
    """Return how a run shares model states out."""
    parallel = config.parallel
    return Sharing(parallel.zero, parallel.bucket_bytes or BUCKET_BYTES, away=away_of(config))


def away_of(config: RunConfig) -> Away | None:
    """Return what a run keeps away from its devices."""
    where, in_file = config.parallel.offload, config.parallel.offload.startswith(NVME)
    if where == "none":
        return None
    weights = config.parallel.zero == 3 if in_file else where == "parameters"
    return Away(weights, in_file)


@attrs.frozen
class RankStates:
    """The model states of one rank.

    Args:
        slices: Of the model, by the stage's number in the pipeline.
        buckets: What the rank holds of each, by the first of the stages that share their states.
        buffer_bytes: Of biases of experts, which are no parameters.
    """

    slices: dict[int, Slice]
    buckets: dict[int, tuple[BucketStates, ...]]
    buffer_bytes: int

    @property
    def all_buckets(self) -> Iterator[BucketStates]:
        """The buckets of all stages."""
        return (bucket for each in self.buckets.values() for bucket in each)

    @property
    def total(self) -> int:
        """Bytes of weights, gradients and states on the device between two steps."""
        held = sum(b.weights + b.gradients + b.states for b in self.all_buckets)
        return held + self.buffer_bytes


def states_of_rank(
    config: RunConfig, shape: ModelShape, schedule: Schedule, rank: int
) -> RankStates:
    """Return what one rank of a run holds between its steps, without building it."""
    layout, sizes = config.parallel.mesh, sizes_of(shape)
    places = layout.places(rank)
    every = slices_of(config.parallel.layers_of_stages(shape.layers))
    own = {number: every[number] for number in schedule.stages_of(places["pp"])}
    groups = [[number] for number in own]
    ends = [number for number, part in own.items() if part.is_first or part.is_last]
    if shape.tied and len(ends) == 2:
        groups = [ends, *([number] for number in own if number not in ends)]
    buckets = {}
    for group in groups:
        held = parameters_of(
            sizes,
            layout,
            [own[number] for number in group],
            tp_rank=places["tp"],
            sequence_parallel=config.parallel.sequence_parallel,
        )
        buckets[group[0]] = buckets_of(held, layout, rank, sharing_of(config), bytes_of(config))
    biases = 0
    if sizes.experts is not None and sizes.experts.biased:
        sparse = sum(sizes.is_sparse(n) for part in own.values() for n in part.blocks)
        wide = max(policy(config.dtype).parameter.itemsize, torch.float32.itemsize)
        biases = sparse * sizes.experts.number * wide
    return RankStates(own, buckets, biases)
