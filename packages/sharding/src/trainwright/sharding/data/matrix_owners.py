"""Which data rank updates which whole matrix, and when: plain data, decided without talking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs


@attrs.frozen
class Round:
    """Matrices that are whole somewhere at the same time.

    Args:
        owned: For each data rank the names of those that it updates.
    """

    owned: tuple[tuple[str, ...], ...]


def assign_owners(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Return the data rank that owns each matrix, so that ranks own about as many elements.

    The largest goes first, to the rank that owns least, the lower rank where two do. No rank then
    owns more than the mean and one matrix.

    Args:
        sizes: Elements by name, in an order that is the same on every rank.
        num_ranks: Data ranks.
    """
    loads = [0] * num_ranks
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        rank = loads.index(min(loads))
        owners[name] = rank
        loads[rank] += sizes[name]
    return {name: owners[name] for name in sizes}


def plan_rounds(
    owners: Mapping[str, int], sizes: Mapping[str, int], num_ranks: int, most: int
) -> tuple[Round, ...]:
    """Return rounds in which every rank owns at most ``most`` elements, or a single matrix.

    Args:
        owners: As `assign_owners` gave them.
        sizes: Elements by name.
        num_ranks: Data ranks.
        most: Elements.
    """
    shares = [
        _fill([name for name in owners if owners[name] == rank], sizes, most)
        for rank in range(num_ranks)
    ]
    return tuple(
        Round(tuple(share[turn] if turn < len(share) else () for share in shares))
        for turn in range(max(map(len, shares), default=0))
    )


def _fill(names: Sequence[str], sizes: Mapping[str, int], most: int) -> list[tuple[str, ...]]:
    shares: list[tuple[str, ...]] = []
    chosen: list[str] = []
    filled = 0
    for name in names:
        if chosen and filled + sizes[name] > most:
            shares.append(tuple(chosen))
            chosen, filled = [], 0
        chosen.append(name)
        filled += sizes[name]
    if chosen:
        shares.append(tuple(chosen))
    return shares
