"""Whether a size can be cut into equal parts, and what to choose instead."""

from __future__ import annotations

from trainwright.sharding.errors import ShardingError


def check_divides(size: int, parts: int, what: str, axis: str) -> None:
    """Raise unless ``parts`` divides ``size``, naming the nearest sizes and counts that work.

    Raises:
        ShardingError: It does not.
    """
    if size % parts == 0:
        return
    below = size // parts * parts
    sizes = f"{below} or {below + parts}" if below else f"{parts}"
    counts = [count for count in range(1, size + 1) if size % count == 0]
    smaller = max((count for count in counts if count < parts), default=1)
    larger = min((count for count in counts if count > parts), default=None)
    near = f"{smaller}" if larger is None else f"{smaller} or {larger}"
    raise ShardingError(
        f"{what} is {size}, which {axis}={parts} does not divide; the nearest sizes that work are "
        f"{sizes}, the nearest {axis} {near}; a layer that takes a cut can have an uneven one, "
        "Cut.uneven"
    )
