"""The weights of a bucket: whole, cut for the optimizer, or gathered only while needed."""

from __future__ import annotations

import attrs
import torch

from trainwright.collectives import Communicator, Work
from trainwright.sharding.data.away import AwayWeights
from trainwright.sharding.data.coded import CodedWeights
from trainwright.sharding.data.policy import WEIGHT_DTYPES
from trainwright.sharding.offload import Ledger


@attrs.define(eq=False)
class FlatWeights:
    """One storage of all weights of a bucket, this rank's range of them, and their masters.

    Args:
        full: All elements, which the module's parameters are views of.
        kept: This rank's range; memory of its own where ``is_cut``, else a part of ``full``.
        masters: What the optimizer updates; ``kept`` itself where the dtypes agree.
        comm: Collects the ranges of all ranks.
        is_cut: Whether ``full`` has memory only between gathering and releasing (stage 3). It is
            always the same storage, resized, so that what autograd saved of it is right again
            after the next gathering.
        coded: The codes that travel in place of the weights; None: the weights themselves do.
        away: Keeps the masters, and maybe ``kept``, away from the device; None: they are on it.
        device: Counts the memory of ``full`` where it comes and goes.
    """

    full: torch.Tensor
    kept: torch.Tensor
    masters: torch.Tensor
    comm: Communicator
    is_cut: bool
    coded: CodedWeights | None = None
    away: AwayWeights | None = None
    device: Ledger | None = None
    is_whole: bool = True
    _work: Work | None = None

    @property
    def separate_masters(self) -> bool:
        """Whether the optimizer's weights are other memory than the module's."""
        return self.masters is not self.kept

    @property
    def is_coming(self) -> bool:
        """Whether a gathering has started and was not waited for."""
        return self._work is not None

    def start_gathering(self) -> None:
        """Start collecting all elements, unless they are here or on their way."""
        if self.is_whole or self._work is not None:
            return
        if self.device is not None:
            self.device.take(self._full_bytes)
        self.full.untyped_storage().resize_(self._full_bytes)
        if self.away is not None and self.away.keeps_weights:
            self._work = self._fetch(self.away)
            return
        if self.coded is not None:
            arriving = self.coded.arriving(self.full.numel())
            self._work = self.comm.all_gather(arriving, self.coded.codes)
            return
        self._work = self.comm.all_gather(_sendable(self.full), _sendable(self.kept))

    def finish_gathering(self) -> None:
        """Wait for what was started."""
        if self._work is not None:
            work = self._work
            self._work = None
            work.wait()
            if self.coded is not None:
                with torch.no_grad():
                    self.coded.decode_into(self.full)
            self.is_whole = True

    def release(self) -> None:
        """Give the memory of all elements back; nothing may read them until gathered again."""
        self.finish_gathering()
        if self.is_cut and self.is_whole:
            self.full.untyped_storage().resize_(0)
            self.is_whole = False
            if self.device is not None:
                self.device.give(self._full_bytes)

    def start_publishing(self) -> None:
        """Copy the masters into this rank's range and, where all are kept, collect the others'."""
        if self.away is not None and self.away.is_trained:
            self.away.publish()
        elif self.separate_masters:
            self.kept.copy_(self.masters)
        if not self.is_cut and self.kept is not self.full and self.comm.size > 1:
            self._work = self.comm.all_gather(self.full, self.kept)

    def finish_publishing(self) -> None:
        """Wait for what was started."""
        self.finish_gathering()

    def load_masters(self) -> None:
        """Make this rank's range and its masters equal to the module's whole weights.

        What was decoded and not changed since leaves them alone: it is less than they are.
        """
        if self.coded is not None:
            start = self.comm.rank * self.kept.numel()
            own = self.full[start : start + self.kept.numel()]
            changed = self.coded.changed(own)
            torch.where(changed, own, self.kept, out=self.kept)
            if self.separate_masters:
                own, changed = own.to(self.masters), changed.to(self.masters.device)
                torch.where(changed, own, self.masters, out=self.masters)
            return
        if self.is_cut:
            start = self.comm.rank * self.kept.numel()
            self.kept.copy_(self.full[start : start + self.kept.numel()])
        if self.separate_masters:
            self.masters.copy_(self.kept)

    @property
    def _full_bytes(self) -> int:
        return self.full.numel() * self.full.itemsize

    def _fetch(self, away: AwayWeights) -> Work:
        start = self.comm.rank * self.kept.numel()
        own = self.full[start : start + self.kept.numel()]
        fetched = away.fetch(own)
        if self.comm.size == 1:
            return fetched
        full, sent = _sendable(self.full), _sendable(own)
        return away.turns.ask(fetched, lambda: self.comm.all_gather(full, sent))


def _sendable(flat: torch.Tensor) -> torch.Tensor:
    # A frozen weight may have any dtype, also one that no collective knows.
    return flat if flat.dtype in WEIGHT_DTYPES else flat.view(torch.uint8)
