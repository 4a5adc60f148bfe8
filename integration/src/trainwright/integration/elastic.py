"""Another number of ranks for the same run: which layout fits them, the global batch being kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.sharding import MeshShape, ShardingError

_TRIED = 4
"""Sizes that do not fit are told up to this many times the size that was asked for."""


@attrs.frozen
class Workload:
    """What of a run decides which layouts fit it.

    Args:
        layout: of the ranks.
        global_batch: sequences a step, which stays whatever the ranks.
        microbatches: microbatches a data rank makes of its share.

    Raises:
        ConfigError: the batch is not shared out evenly.
    """

    layout: MeshShape
    global_batch: int
    microbatches: int

    def __attrs_post_init__(self) -> None:
        unit = self.layout.dp * self.microbatches
        if self.global_batch % unit:
            raise ConfigError(
                f"global_batch={self.global_batch} must be a multiple of dp={self.layout.dp} * "
                f"microbatches={self.microbatches} = {unit}"
            )

    @property
    def rows(self) -> int:
        """Sequences of a microbatch: what decides how much memory activations take."""
        return self.global_batch // (self.layout.dp * self.microbatches)

    @property
    def ranks(self) -> int:
        """Ranks that the layout has."""
        return self.layout.world_size


def fit(work: Workload, ranks: int, *, exactly: bool = False, at_least: int = 1) -> Workload:
    """Return the same run on another number of ranks.

    What a rank holds of a layer, and how many stages there are, stays: tp, pp, cp, ep and etp. The
    data ranks become as many as the batch divides over. A microbatch keeps its rows where it can,
    else it has fewer, never more: so the accumulation changes, and the memory of activations does
    not grow.

    Args:
        work: the run as it was.
        ranks: how many there are now.
        exactly: whether all of them must be used, and not just as many as fit.
        at_least: fewer are refused.

    Raises:
        ConfigError: no layout fits; the numbers of ranks that do are named.
    """
    for found in fitting(work, [ranks] if exactly else range(ranks, 0, -1)):
        if found.ranks < at_least:
            break
        return found
    tried = range(1, _TRIED * max(ranks, work.ranks) + 1)
    works = [str(found.ranks) for found in fitting(work, tried) if found.ranks >= at_least]
    floor = f", at least {at_least} being asked for" if at_least > 1 else ""
    number = "1 rank does" if ranks == 1 else f"{ranks} ranks do"
    raise ConfigError(
        f"{number} not fit --layout {work.layout} with --global-batch "
        f"{work.global_batch}{floor}: only dp changes with the ranks, and it must divide the "
        f"batch; {', '.join(works[:12]) or 'no number of'} ranks work"
    )


def fitting(work: Workload, sizes: Iterable[int]) -> Iterator[Workload]:
    """Yield the same run on each of these numbers of ranks that fits it."""
    group = work.layout.pp * work.layout.cp * work.layout.tp
    for ranks in sizes:
        dp, rest = divmod(ranks, group)
        if rest or not dp or work.global_batch % dp:
            continue
        try:
            layout = attrs.evolve(work.layout, dp=dp, dp_shard=_shard(work.layout, dp))
        except ShardingError:  # experts are shared by ranks that are not there
            continue
        yield Workload(layout, work.global_batch, _microbatches(work, dp))


def _shard(layout: MeshShape, dp: int) -> int | None:
    """Return over how many ranks a copy of the states is cut: as many as before, or next more."""
    if layout.dp_shard is None:
        return None
    return next(size for size in range(min(layout.dp_shard, dp), dp + 1) if dp % size == 0)


def _microbatches(work: Workload, dp: int) -> int:
    share = work.global_batch // dp
    fewest = -(-share // work.rows)
    return next(count for count in range(fewest, share + 1) if share % count == 0)
