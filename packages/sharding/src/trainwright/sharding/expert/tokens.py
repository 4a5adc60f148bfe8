"""The tokens that a rank routes: all that it has, or over tp a part of those that all have."""

# Shapes: B batch, S sequence, D model, N tokens of this rank.

from __future__ import annotations

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.sharding.expert.routing import Scope
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.parts import join_parts, take_part
from trainwright.sharding.tensor.sequence import SequenceSharding

_PLACES_OF_A_SEQUENCE = 1 << 32


@attrs.frozen(eq=False)
class Tokens:
    """Where this rank's tokens stand.

    Args:
        group: int64 [N], the group of tokens that each is counted with.
        place: int64 [N], orders the tokens of a group: smaller ones come first.
        valid: bool [N]; None where all are.
        num_groups: How many groups there are.
    """

    group: torch.Tensor
    place: torch.Tensor
    valid: torch.Tensor | None
    num_groups: int


@attrs.frozen(eq=False)
class TokenCut:
    """Which of the positions of an activation a rank routes.

    Args:
        shape: B, S, D.
        tp: The tensor-parallel ranks.
        cut: Of the B * S tokens over tp; None where this rank routes all it has.
        first: The position of the first column.
    """

    shape: tuple[int, int, int]
    tp: Communicator
    cut: Cut | None
    first: int

    @classmethod
    def of(cls, shape: torch.Size, tp: Communicator, sequence: SequenceSharding | None) -> TokenCut:
        """Return that of an activation of a shape.

        Args:
            shape: B, S, D on this rank.
            tp: The tensor-parallel ranks.
            sequence: How they have cut its positions; None where each has all.
        """
        batch, length, width = shape
        if sequence is not None:
            whole = length * tp.size if sequence.length is None else sequence.length
            first = tp.rank * -(-whole // tp.size)
            return cls((batch, length, width), tp, None, first)
        cut = Cut.uneven(batch * length, tp.size) if tp.size > 1 else None
        return cls((batch, length, width), tp, cut, 0)

    def take(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [N, D].

        Communicates:
            Forward nothing; where tokens are cut here, backward one all-gather.
        """
        flat = hidden_BSD.flatten(0, 1)
        return flat if self.cut is None else take_part(flat, self.tp, self.cut, 0)

    def join(self, tokens_ND: torch.Tensor) -> torch.Tensor:
        """Return the activation [B, S, D] of which this rank has the tokens.

        Communicates:
            Where tokens are cut here, forward one all-gather; backward nothing.
        """
        if self.cut is not None:
            tokens_ND = join_parts(tokens_ND, self.tp, self.cut, 0)
        return tokens_ND.view(self.shape)

    def tokens(
        self,
        valid_BS: torch.Tensor | None,
        positions_S: torch.Tensor | None,
        scope: Scope,
        device: torch.device,
    ) -> Tokens:
        """Say where this rank's tokens stand.

        Args:
            valid_BS: bool, of the activation; None where all are.
            positions_S: Of its columns; None: one after the other.
            scope: What a group is.
            device: Where the tokens are.
        """
        batch, length, _ = self.shape
        start, stop = 0, batch * length
        if self.cut is not None:
            start, stop = (self.cut.ranges[self.tp.rank] or ((0, 0),))[0]
        index = torch.arange(start, stop, device=device)
        sequence = index.div(max(length, 1), rounding_mode="floor")
        column = index - sequence * length
        position = column + self.first if positions_S is None else positions_S[column]
        is_one = scope == "microbatch"
        return Tokens(
            group=torch.zeros_like(sequence) if is_one else sequence,
            place=sequence * _PLACES_OF_A_SEQUENCE + position,
            valid=None if valid_BS is None else valid_BS.flatten()[start:stop],
            num_groups=1 if is_one else batch,
        )
