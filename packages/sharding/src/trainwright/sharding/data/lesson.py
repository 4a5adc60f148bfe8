"""A pass whose gathers the ranks agree on one by one, so that all know the order afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.sharding.data.passes import Pass, insert_unused, merge_orders

IDLE = -1
"""Said by a rank that gathers nothing more and has run nothing of this pass itself."""
DONE = -2
"""Said by a rank that gathers nothing more."""


class KindMismatchError(Exception):
    """Ranks are in passes of different kinds; the argument gives each rank's."""


class Lesson:
    """What the ranks want one after the other in one pass.

    Args:
        kind: Of the pass.
        agree: Joins the ranks; alone, nothing is sent.
        usual: All units, as a pass of this kind most likely needs them.
    """

    def __init__(self, kind: Pass, agree: Communicator, usual: Sequence[int]) -> None:
        self.kind = kind
        self.agreed: list[int] = []
        self.wanted: list[list[int]] = [[] for _ in range(agree.size)]
        self.was_run = False
        self.was_run_by_all = False
        self._agree = agree
        self._usual = usual
        self._rank = {unit: place for place, unit in enumerate(usual)}

    @property
    def mine(self) -> list[int]:
        """What this rank has wanted and got so far."""
        return self.wanted[self._agree.rank]

    def choose(self, want: int) -> int | None:
        """Return the unit that all ranks gather next, or None if no rank wants any more.

        Args:
            want: The unit this rank needs next, `IDLE` or `DONE`.

        Communicates:
            One all-gather of 16 bytes, whose result the host reads.
        """
        wants = self._exchange(want)
        units = [unit for unit in wants if unit >= 0]
        if not units:
            self.was_run = DONE in wants
            self.was_run_by_all = IDLE not in wants
            return None
        chosen = min(units, key=self._rank.__getitem__)
        self.agreed.append(chosen)
        for rank, unit in enumerate(wants):
            if unit == chosen:
                self.wanted[rank].append(unit)
        return chosen

    def unite(self, units: set[int], num_units: int) -> set[int]:
        """Return the units that any rank names."""
        if self._agree.size == 1:
            return units
        named = torch.zeros(num_units, dtype=torch.int64, device=self._agree.device)
        for unit in units:
            named[unit] = 1
        self._agree.all_reduce(named, ReduceOp.MAX).wait()
        return {unit for unit, found in enumerate(named.tolist()) if found}

    def sequence(self, candidates: set[int]) -> tuple[tuple[int, ...], bool]:
        """Return what later passes gather, and whether it serves each rank without surplus.

        Args:
            candidates: Units that a later pass may need although nobody did in this one.
        """
        merged = merge_orders(self.wanted, self._usual)
        sequence = tuple(self.agreed) if merged is None else merged
        return insert_unused(sequence, self._usual, candidates), merged is not None

    def _exchange(self, want: int) -> list[int]:
        if self._agree.size == 1:
            return [want]
        device = self._agree.device
        mine = torch.tensor([int(self.kind), want], dtype=torch.int64, device=device)
        every = torch.empty(2 * self._agree.size, dtype=torch.int64, device=device)
        self._agree.all_gather(every, mine).wait()
        rows: list[list[int]] = every.view(-1, 2).tolist()
        kinds = [Pass(kind) for kind, _ in rows]
        if len(set(kinds)) > 1:
            raise KindMismatchError(
                ", ".join(f"rank {rank} a {kind}" for rank, kind in enumerate(kinds))
            )
        return [unit for _, unit in rows]
