"""What each rank of a run will hold at most, without building it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.estimate_model import away_of, sizes_of, states_of_rank
from trainwright.integration.model import ModelShape
from trainwright.integration.sharded import LIVE_UNITS, REDUCE_DTYPES, gathers_stages
from trainwright.integration.stepping import make_schedule
from trainwright.pipeline_schedules import Kind, Schedule
from trainwright.pipeline_schedules.actions import FORWARD_KINDS
from trainwright.precision import policy
from trainwright.sharding.memory import (
    Chunk,
    InFlight,
    KeptBytes,
    RankMemory,
    Tokens,
    Traffic,
    decoder_bytes,
    memory,
)

BLOCK_OF_LOSS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Logits that the loss works on at once."""

LIVE_REDUCTIONS = 2
"""The unit whose gradients are written, and the one before it, which is under way."""

LIVE_MOVES = 2
"""Units whose sums are on their way to the host, where they are kept there: two buffers."""


def memory_of_rank(
    config: RunConfig,
    shape: ModelShape,
    rank: int,
    *,
    kind: str = "cuda",
    reserve: float = 0.0,
    live_reductions: int | None = None,
    schedule: Schedule | None = None,
) -> RankMemory:
    """Return what a rank holds at the worst moment of a step.

    Args:
        config: the settings, which fit the model.
        shape: the model's, with what the settings add.
        rank: which of the world.
        kind: of the device, "cpu" or "cuda": norms are one kernel on one of them only.
        reserve: share of everything else that fragmentation is given.
        live_reductions: units whose gradients are whole at once where they are reduced while the
            backward goes on; None: those of a run whose reductions and moves take their time.
        schedule: of a step, the same for all ranks; None makes it.
    """
    schedule = schedule or make_schedule(config)
    if live_reductions is None:
        live_reductions = LIVE_REDUCTIONS + LIVE_MOVES * (away_of(config) is not None)
    places = config.parallel.mesh.places(rank)
    states = states_of_rank(config, shape, schedule, rank)
    numbers = list(states.slices)
    chunks = [Chunk(states.slices[n], states.buckets.get(n, ())) for n in numbers]
    kept = kept_of(config, shape, places["tp"], kind)
    return memory(
        sizes_of(shape),
        chunks,
        in_flight(schedule, places["pp"], numbers, [ChunkBytes.of(c, kept) for c in chunks]),
        kept,
        attrs.evolve(traffic_of(config), reserve=reserve, live_reductions=live_reductions),
        buffer_bytes=states.buffer_bytes,
    )


def kept_of(config: RunConfig, shape: ModelShape, tp_rank: int, kind: str) -> KeptBytes:
    """Return what a microbatch takes on a tensor rank."""
    compute = policy(config.dtype).compute
    tokens = Tokens(
        batch=config.sizes.micro_batch,
        sequence=-(-config.batch.sequence_length // config.parallel.mesh.cp),
        compute=compute.itemsize,
        sequence_parallel=config.parallel.sequence_parallel,
        fused_norms=kind != "cpu",
        segment=segment_of(config, shape),
        keeps_products=config.activations.recompute == "selective",
        grouped_products=kind != "cpu" and compute == torch.bfloat16,
        block_of_loss=BLOCK_OF_LOSS[kind],
    )
    return decoder_bytes(sizes_of(shape), config.parallel.mesh, tokens, tp_rank=tp_rank)


def segment_of(config: RunConfig, shape: ModelShape) -> int:
    """Return how many blocks are recomputed together; 0 where none are."""
    recompute = config.activations.recompute
    if recompute == "none":
        return 0
    if recompute in ("full", "selective"):
        return 1
    if recompute.startswith("every-"):
        return int(recompute.partition("-")[2])
    if recompute == "sqrt":
        most = max(map(len, config.parallel.layers_of_stages(shape.layers)))
        return max(1, math.isqrt(max(0, most - 1)) + 1)
    raise ConfigError(
        f"--recompute {recompute} is not estimated; none, full, selective, every-K and sqrt are"
    )


def traffic_of(config: RunConfig) -> Traffic:
    """Return when weights are whole and gradients are reduced."""
    parallel = config.parallel
    wire = REDUCE_DTYPES.get(parallel.reduce_dtype or "")
    return Traffic(
        live_units=None if gathers_stages(config) else parallel.live_units or LIVE_UNITS,
        all_chunks=parallel.gather != "action",
        reduce_each_backward=parallel.reduce == "microbatch" or config.sizes.microbatches == 1,
        wire_bytes=0 if wire is None else wire.itemsize,
    )


@attrs.frozen
class ChunkBytes:
    """About what a microbatch keeps of a chunk, to tell moments apart.

    Args:
        held: from its forward to its backward.
        deferred: from its input gradients to its weight gradients.
    """

    held: int
    deferred: int

    @classmethod
    def of(cls, chunk: Chunk, kept: KeptBytes) -> ChunkBytes:
        """Return those of a chunk."""
        blocks, part = len(chunk.part.blocks), chunk.part
        each = kept.dense.kept
        if kept.segment:
            each = kept.recomputed(kept.dense) // kept.segment
        ends = (kept.head + kept.logits) * part.is_last
        deferred = blocks * kept.dense.deferred + part.is_last * kept.head_deferred
        return cls(blocks * each + ends, deferred)


def in_flight(
    schedule: Schedule, pipeline_rank: int, numbers: Sequence[int], sizes: Sequence[ChunkBytes]
) -> list[InFlight]:
    """Return what a rank holds when the backwards begin that may be the worst.

    For each chunk these are its first backward, before which its gradients are not there, and of
    the later ones the one with most.
    """
    held, waiting = dict.fromkeys(numbers, 0), dict.fromkeys(numbers, 0)
    begun: set[int] = set()
    worst: dict[tuple[int, bool], tuple[int, InFlight]] = {}
    index = {number: place for place, number in enumerate(numbers)}
    for kind, stage, *_ in np.asarray(schedule.actions[pipeline_rank]).tolist():
        if kind in FORWARD_KINDS:
            held[stage] += 1
        elif kind in (Kind.B, Kind.I):
            counts = tuple(held[number] for number in numbers)
            later = tuple(waiting[number] for number in numbers)
            size = sum(
                count * each.held + wait * each.deferred
                for count, wait, each in zip(counts, later, sizes, strict=True)
            )
            key = (stage, stage in begun)
            found = InFlight(
                counts,
                index[stage],
                frozenset(index[each] for each in begun),
                later,
                splits=kind == Kind.I,
            )
            if key not in worst or worst[key][0] < size:
                worst[key] = (size, found)
            begun.add(stage)
            held[stage] -= 1
            waiting[stage] += kind == Kind.I
        elif kind == Kind.W:
            waiting[stage] -= 1
    return [found for _, found in worst.values()]
