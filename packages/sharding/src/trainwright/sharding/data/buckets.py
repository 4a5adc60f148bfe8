"""What one collective moves: consecutive parameters of a unit, their weights and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from trainwright.sharding.data.gradients import FlatGradients
from trainwright.sharding.data.members import Member
from trainwright.sharding.data.piece import Piece
from trainwright.sharding.data.weights import FlatWeights


@attrs.frozen(eq=False)
class KeptPiece:
    """A piece and its part of the kept gradients; None where it is not trained."""

    piece: Piece
    gradient: torch.Tensor | None


@attrs.define(eq=False)
class Bucket:
    """Parameters that are gathered and reduced by one collective.

    Args:
        members: The parameters in it.
        weights: Their weights.
        gradients: Their gradients; None where they are not trained.
        kept: The pieces of parameters in this rank's range.
        pending: Members whose gradients the counted backward has not completed yet.
        is_complete: Whether its reduction may start as soon as those before it have.
        is_started: Whether its reduction has begun; no gradient may be added to it.
    """

    members: Sequence[Member]
    weights: FlatWeights
    gradients: FlatGradients | None
    kept: list[KeptPiece] = attrs.field(factory=list)
    pending: int = 0
    is_complete: bool = False
    is_started: bool = False

    @property
    def sums(self) -> FlatGradients:
        """The gradients of a bucket that is trained."""
        assert self.gradients is not None
        return self.gradients

    def link(self, member: Member) -> None:
        """Let one gradient stand in the flat buffer."""
        self._open()
        member.link_gradient()

    def start_reduction(self) -> None:
        """Start summing the gradients over the data ranks; missing ones are zero.

        Where memory is lent the parameters have no gradient from here on: what autograd still adds
        does not reach memory that is being sent.
        """
        self._open()
        for member in self.members:
            member.link_gradient()
        self.is_started = True
        self.sums.start()
        if self.sums.is_lent:
            self.drop_gradients()

    def collect(self) -> None:
        """Wait for the data ranks' sums, and give memory back that is lent."""
        self.sums.collect()
        self._forget_closed()

    def drop_gradients(self) -> None:
        """Let the module's parameters have no gradient."""
        for member in self.members:
            member.parameter.grad = None

    def finish_reduction(self) -> None:
        """Wait for everything, and give the sums to the pieces."""
        self.sums.finish()
        if self.sums.is_sharded:
            # A sharded rank has summed only its range: the whole would mislead.
            self.drop_gradients()
        else:
            for member in self.members:
                member.parameter.grad = member.gradient
        for kept in self.kept:
            kept.piece.parameter.grad = kept.gradient

    def reopen(self) -> None:
        """Take gradients again in the same step."""
        self.is_started = False
        self.is_complete = False

    def forget_gradients(self) -> None:
        """Begin a step without gradients."""
        self.reopen()
        self.drop_gradients()
        self.sums.begin()
        self.sums.close()
        self._forget_closed()
        for kept in self.kept:
            kept.piece.parameter.grad = None

    def show(self) -> None:
        """Wait for gathered weights and let the parameters be views of them."""
        if self.weights.is_coming:
            self.weights.finish_gathering()
            for member in self.members:
                member.show()

    def release(self) -> None:
        """Give gathered weights back; the parameters are NaN until they are gathered again."""
        weights = self.weights
        if not weights.is_cut:
            return
        if weights.is_whole:
            for member in self.members:
                member.hide()
        weights.release()

    def check_intact(self) -> None:
        """Raise if a parameter was replaced, moved, frozen or unfrozen."""
        released = not self.weights.is_whole
        for member in self.members:
            member.check_intact(released=released)

    def _open(self) -> None:
        self.sums.collect()
        if self.sums.open():
            for member in self.members:
                member.gradient = self.sums.full[member.place].view(member.weight.shape)

    def _forget_closed(self) -> None:
        if not self.sums.is_open:
            for member in self.members:
                member.gradient = None
