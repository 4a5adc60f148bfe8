"""The gradients of a bucket: where they accumulate, how they are summed, what a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from trainwright.collectives import Communicator, Work
from trainwright.sharding.data.away import GradientTravel
from trainwright.sharding.data.memory import travelling


@attrs.define(eq=False)
class FlatGradients:
    """One storage of all gradients of a bucket and this rank's range of the sums.

    Args:
        full: All elements; none while it is closed.
        numel: How many there are.
        kept: This rank's range; memory of its own where ``is_lent``, else a part of ``full``.
        gaps: The parts of ``full`` that belong to no parameter.
        data: Joins the ranks that the gradients are summed over first.
        partial: Joins the ranks whose sums are added afterwards, on the kept range.
        wire_dtype: Dtype in which gradients travel.
        is_lent: Whether ``full`` is there only from a first gradient to the end of its reduction
            (stages 2 and 3). It is other memory each time, so that who keeps a gradient keeps it.
        travel: Moves the sums to ``kept``, which is host memory then; None: it is on the device.
    """

    full: torch.Tensor
    numel: int
    kept: torch.Tensor
    gaps: Sequence[slice]
    data: Communicator
    partial: Sequence[Communicator]
    wire_dtype: torch.dtype
    is_lent: bool
    is_open: bool = True
    travel: GradientTravel | None = None
    _has_sums: bool = False
    _moves: list[Work] = attrs.field(factory=list)
    _arriving: torch.Tensor | None = None
    _wire: torch.Tensor | None = None
    _work: Work | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether a rank keeps only its range of the sums."""
        return self.kept is not self.full

    @property
    def in_flight(self) -> bool:
        """Whether a reduction over the data ranks was started and not collected."""
        return self._work is not None

    @property
    def meets_others(self) -> bool:
        """Whether other ranks take part in its reductions, so that collecting may wait."""
        return self.data.size > 1

    @property
    def leaves_early(self) -> bool:
        """Whether memory is freed, or the host reached, by collecting while a backward goes on."""
        return self.is_lent or self.travel is not None

    def open(self) -> bool:
        """Have memory for all elements, its padding zero; return whether it is new."""
        if self.is_open:
            return False
        if self.travel is not None:
            self.travel.offload.device.take(self._full_bytes)
        self.full = travelling([self.data], self.numel, self.kept.dtype, self.full.device)
        for gap in self.gaps:
            self.full[gap].zero_()
        self.is_open = True
        return True

    def close(self) -> None:
        """Give that memory back where it is lent."""
        if self.is_lent and self.is_open:
            if self.travel is not None:
                self.travel.offload.device.give(self._full_bytes)
            self._drop()

    def begin(self) -> None:
        """Forget the sums: the next reduction of this step is its first."""
        self._arrive()
        self._has_sums = False

    def start(self) -> None:
        """Start summing over the data ranks; the gradients belong to it until collected."""
        if self.data.size == 1 and self.travel is None:
            return
        wire = self.full
        if self.wire_dtype != wire.dtype:
            wire = travelling([self.data], self.numel, self.wire_dtype, wire.device).copy_(wire)
        if self.kept.numel() == self.numel:
            self._arriving = self._wire = wire
            self._work = self.data.all_reduce(wire)
            return
        arriving = self.kept
        if wire is not self.full or self._has_sums or self.travel is not None:
            # This rank's own part of what is sent: no memory beside it.
            start = self.data.rank * self.kept.numel()
            arriving = wire[start : start + self.kept.numel()]
        self._arriving, self._wire = arriving, wire
        self._work = self.data.reduce_scatter(arriving, wire)

    def collect(self) -> None:
        """Wait for the data ranks, put or add the sums into the kept range, and close."""
        work, arriving = self._work, self._arriving
        if work is None or arriving is None:
            return
        self._work = self._arriving = self._wire = None
        work.wait()
        if self.travel is not None:
            self._leave(arriving, self.travel)
            return
        if self._has_sums:
            self.kept.add_(arriving)
        elif arriving is not self.kept:
            self.kept.copy_(arriving)
        self._has_sums = True
        self.close()

    def is_collectable(self, within_s: float) -> bool:
        """Return whether `collect` need not wait for other ranks, waiting so long for that."""
        return self._work is None or self._work.is_done(within_s)

    def fill(self) -> None:
        """Let the sums be zero if no reduction was collected in this step."""
        if self.is_lent and not self._has_sums:
            self.kept.zero_()

    def add_partial(self) -> None:
        """Sum the kept range over the further axes, the last of them still under way."""
        for communicator in self.partial:
            self.finish()
            if self.kept.device.type == communicator.device.type:
                self._work = communicator.all_reduce(self.kept)
                continue
            sums = self.kept.to(communicator.device)
            communicator.all_reduce(sums).wait()
            self.kept.copy_(sums)

    def finish(self) -> None:
        """Wait for the sums over the further axes, and for what is on its way to the host."""
        self._arrive()
        if self._work is not None:
            self._work.wait()
            self._work = None

    @property
    def _full_bytes(self) -> int:
        return self.numel * self.kept.itemsize

    def _leave(self, arriving: torch.Tensor, travel: GradientTravel) -> None:
        freed = self._full_bytes if self.is_lent else 0
        move = travel.move(arriving, self.kept, add=self._has_sums, freed_bytes=freed)
        self._moves.append(move)
        self._has_sums = True
        if self.is_lent:
            self._drop()

    def _drop(self) -> None:
        self.full = self.full.new_empty(0)
        self.is_open = False

    def _arrive(self) -> None:
        while self._moves:
            self._moves.pop(0).wait()
