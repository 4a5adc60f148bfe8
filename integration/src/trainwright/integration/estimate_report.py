"""What the ranks of a run will hold, whether that fits a device, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.estimate_memory import memory_of_rank
from trainwright.integration.fitting import check_fits
from trainwright.integration.model import ModelShape
from trainwright.integration.stepping import make_schedule
from trainwright.integration.values import option
from trainwright.pipeline_schedules import ScheduleError
from trainwright.sharding import ShardingError
from trainwright.sharding.memory import RankMemory

MOST_CHANGES = 4
"""Settings that are changed together at most, to find some that fit."""


@attrs.frozen
class Loaded:
    """The rank that holds most of those at one place of the pipeline.

    Args:
        place: of the pipeline.
        rank: of the world.
        blocks: of the model, those of each chunk.
        memory: what it holds.
    """

    place: int
    rank: int
    blocks: tuple[range, ...]
    memory: RankMemory

    @property
    def name(self) -> str:
        """What tables call it."""
        ranges = ", ".join(f"{each.start}-{each.stop - 1}" for each in self.blocks)
        return f"pp {self.place}: layers {ranges}"


@attrs.frozen
class Change:
    """Settings that differ from those that were asked for.

    Args:
        leaves: their values by name.
        most: bytes that some rank then holds.
    """

    leaves: Mapping[str, Any]
    most: int

    def __str__(self) -> str:
        words = []
        for name, value in self.leaves.items():
            if value is None:
                words.append(f"without {option(name)}")
            else:
                words.append(option(name) if value is True else f"{option(name)} {value}")
        return " ".join(words)


def loaded_ranks(
    config: RunConfig, shape: ModelShape, *, kind: str = "cuda", reserve: float = 0.0
) -> list[Loaded]:
    """Return the fullest rank at each place of the pipeline.

    Data ranks hold equal shares, the first ones without padding. So do tensor ranks, unless they
    do not divide the heads; of everything else the first has one row more.

    Args:
        config: the settings.
        shape: the model's.
        kind: of the device, "cuda" or "cpu".
        reserve: share that fragmentation is given.

    Raises:
        ConfigError: they do not fit the model, or hold what is not estimated.
    """
    check_fits(shape, config)
    check_estimated(config)
    layout, schedule = config.parallel.mesh, make_schedule(config)
    blocks = config.parallel.layers_of_stages(shape.layers)
    shared = shape.kv_heads % layout.tp and layout.tp % shape.kv_heads
    uneven = shape.heads % layout.tp or shared
    found = []
    for place in range(layout.pp):
        ranks = [layout.rank(pp=place, tp=each) for each in range(layout.tp if uneven else 1)]
        held = {
            rank: memory_of_rank(config, shape, rank, kind=kind, reserve=reserve, schedule=schedule)
            for rank in ranks
        }
        most = max(ranks, key=lambda rank: held[rank].total)
        own = tuple(blocks[number] for number in schedule.stages_of(place))
        found.append(Loaded(place, most, own, held[most]))
    return found


def check_estimated(config: RunConfig) -> None:
    """Refuse settings whose memory is not known.

    Raises:
        ConfigError: naming the setting and what is estimated.
    """
    kept = config.activations
    if kept.offload_activations is not None or kept.compress_activations is not None:
        raise ConfigError(
            "--offload-activations and --compress-activations are not estimated; without them the "
            "estimate is an upper bound"
        )
    if config.dtype.startswith("fp8"):
        raise ConfigError(
            f"--dtype {config.dtype}: what FP8 products keep is not estimated; bfloat16 is"
        )


def changes_that_fit(
    config: RunConfig, shape: ModelShape, limit: float, *, kind: str, reserve: float
) -> list[Change]:
    """Return what to change so that every rank fits, the least changes first.

    Each of the usual ones is tried alone, then more and more of them together, at last with states
    away from the device. If none fits, the one that holds least is returned.

    Args:
        config: the settings, with which some rank does not fit.
        shape: the model's.
        limit: bytes of a device.
        kind: of the device.
        reserve: share that fragmentation is given.
    """

    def tried(leaves: Mapping[str, Any]) -> Change | None:
        try:
            ranks = loaded_ranks(config.evolve(**leaves), shape, kind=kind, reserve=reserve)
        except (ConfigError, ScheduleError, ShardingError):
            return None
        return Change(leaves, max(each.memory.total for each in ranks))

    alone = [found for leaves in _candidates(config) if (found := tried(leaves)) is not None]
    fitting = [each for each in alone if each.most <= limit]
    if fitting:
        return sorted(fitting, key=lambda each: each.most)
    joined: dict[str, Any] = {}
    least = min(alone, key=lambda each: each.most, default=None)
    usual = [each.leaves for each in sorted(alone, key=lambda each: each.most)[:MOST_CHANGES]]
    for leaves in (*usual, *_last_resorts(config)):
        joined = {**leaves, **joined}
        found = tried(joined)
        if found is not None and (least is None or found.most < least.most):
            least = found
        if least is not None and least.most <= limit:
            break
    return [] if least is None else [least]


def _last_resorts(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield what takes states from the device, which costs time in every step."""
    if config.parallel.offload == "none":
        yield {"offload": "optimizer"}


def _candidates(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield changes of settings that usually save memory."""
    parallel, mesh, sizes = config.parallel, config.parallel.mesh, config.sizes
    if mesh.dp * mesh.cp > 1:
        for stage in range(parallel.zero + 1, 4):
            yield {"zero": stage}
    if config.activations.recompute == "none":
        yield {"recompute": "full"}
    if mesh.tp > 1 and not parallel.sequence_parallel:
        yield {"sequence_parallel": True}
    if sizes.micro_batch > 1:
        yield {
            "micro_batch": sizes.micro_batch // 2,
            "microbatches": None,
            "global_batch": sizes.global_batch,
        }
    for axis in ("tp", "pp"):
        if mesh.dp % 2 == 0 and mesh.dp_shard is None:
            size = 2 * getattr(mesh, axis)
            wider = attrs.evolve(mesh, dp=mesh.dp // 2, **{axis: size})
            yield {
                "layout": str(wider),
                "global_batch": sizes.global_batch,
                "micro_batch": sizes.micro_batch,
                "microbatches": None,
            }
