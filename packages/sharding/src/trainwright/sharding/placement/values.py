"""What the ranks of one mesh axis hold of a tensor."""

from __future__ import annotations

import attrs

from trainwright.sharding.errors import ShardingError


@attrs.frozen
class Replicate:
    """Every rank of the axis holds the same whole tensor."""


@attrs.frozen
class Shard:
    """Rank r of the axis holds the r-th of the equal parts along ``dim``.

    Args:
        dim: The dimension that is cut, counted from the front.

    Raises:
        ShardingError: ``dim`` is negative or not an int.
    """

    dim: int

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 0:
            raise ShardingError(f"Shard(dim) counts from the front: dim >= 0, got {self.dim!r}")


@attrs.frozen
class Partial:
    """The tensor is the sum over the ranks of the axis of what each of them holds."""


Placement = Replicate | Shard | Partial
"""What the ranks of one axis hold."""
