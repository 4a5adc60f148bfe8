"""Collects the parts of matrices at their owners and hands updated parts back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from trainwright.collectives import Box, Communicator
from trainwright.sharding.data.matrix_owners import Round, assign_owners, plan_rounds
from trainwright.sharding.data.matrix_parts import Matrix

Update = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], None]
"""Updates whole weights in place, given by name, with their gradients."""

Held = Sequence[tuple[Box, ...]]
"""By rank, which boxes of a matrix it keeps."""


class Fleet:
    """The matrices that the same ranks keep between them in the same dtype.

    Args:
        matrices: By label, in an order that is the same on every rank.
        held: By label, who keeps what of it.
        ranks: Joins these ranks; None where each rank keeps its matrices whole.
        like: A tensor with the pieces' dtype and device.
        round_bytes: Most bytes of whole weights that a rank holds at once, unless one matrix alone
            is larger.
    """

    def __init__(
        self,
        matrices: Mapping[str, Matrix],
        held: Mapping[str, Held],
        ranks: Communicator | None,
        like: torch.Tensor,
        round_bytes: int,
    ) -> None:
        self.matrices = dict(matrices)
        self.like = like
        self._ranks = ranks
        sizes = {label: matrix.numel for label, matrix in matrices.items()}
        num_ranks = 1 if ranks is None else ranks.size
        self.owners = assign_owners(sizes, num_ranks)
        self.rounds = plan_rounds(self.owners, sizes, num_ranks, round_bytes // like.element_size())
        # Of the others' matrices nobody here needs to know who keeps what.
        self._held = {label: tuple(held[label]) for label in self.owned if ranks is not None}

    @property
    def owned(self) -> tuple[str, ...]:
        """The matrices that this rank updates."""
        rank = 0 if self._ranks is None else self._ranks.rank
        return tuple(label for label, owner in self.owners.items() if owner == rank)

    def update(self, update: Update) -> None:
        """Let owners update their matrices and every rank have its updated pieces."""
        for share in self.rounds:
            if self._ranks is None:
                self._update_here(share, update)
            else:
                self._update_round(share, self._ranks, update)

    def _update_here(self, share: Round, update: Update) -> None:
        weights: dict[str, torch.Tensor] = {}
        gradients: dict[str, torch.Tensor] = {}
        for label in share.owned[0]:
            matrix = self.matrices[label]
            weights[label] = matrix.whole(matrix.weight())
            gradients[label] = matrix.whole(matrix.gradient())
        update(weights, gradients)
        for label, weight in weights.items():
            self.matrices[label].put_back(weight)

    def _update_round(self, share: Round, ranks: Communicator, update: Update) -> None:
        mine = share.owned[ranks.rank]
        outgoing = [
            [part for label in labels for part in self._kept_parts(label)] for labels in share.owned
        ]
        sizes = [
            2 * sum(self.matrices[label].num_kept for label in labels) for labels in share.owned
        ]
        # Every rank's two parts of each of my matrices, the gradient's and the weight's.
        incoming = [2 * self._count(mine, rank) for rank in range(ranks.size)]
        received = _swap(ranks, outgoing, sizes, incoming, self.like)
        gradients = {label: self._new_whole(label) for label in mine}
        weights = {label: self._new_whole(label) for label in mine}
        at = 0
        for rank in range(ranks.size):
            for label in mine:
                for whole in (gradients[label], weights[label]):
                    for box in self._held[label][rank]:
                        part = received[at : at + box.numel]
                        whole[box.slices] = part.view(box.shape)
                        at += box.numel
        del received, outgoing
        update(weights, gradients)
        self._hand_back(share, ranks, weights)

    def _hand_back(
        self, share: Round, ranks: Communicator, weights: Mapping[str, torch.Tensor]
    ) -> None:
        outgoing = [
            [
                weight[box.slices].reshape(-1)
                for label, weight in weights.items()
                for box in self._held[label][rank]
            ]
            for rank in range(ranks.size)
        ]
        sizes = [self._count(tuple(weights), rank) for rank in range(ranks.size)]
        incoming = [
            sum(self.matrices[label].num_kept for label in labels) for labels in share.owned
        ]
        received = _swap(ranks, outgoing, sizes, incoming, self.like)
        at = 0
        for label in (label for labels in share.owned for label in labels):
            matrix = self.matrices[label]
            for start, stop in matrix.runs:
                matrix.weight()[start:stop] = received[at : at + stop - start]
                at += stop - start

    def _kept_parts(self, label: str) -> list[torch.Tensor]:
        matrix = self.matrices[label]
        if not matrix.runs:
            return []
        return [
            flat[start:stop]
            for flat in (matrix.gradient(), matrix.weight())
            for start, stop in matrix.runs
        ]

    def _count(self, labels: Sequence[str], rank: int) -> int:
        return sum(box.numel for label in labels for box in self._held[label][rank])

    def _new_whole(self, label: str) -> torch.Tensor:
        return self.like.new_empty(self.matrices[label].shape)


def _swap(
    ranks: Communicator,
    outgoing: Sequence[Iterable[torch.Tensor]],
    sizes: Sequence[int],
    incoming: Sequence[int],
    like: torch.Tensor,
) -> torch.Tensor:
    """Send to each rank what is for it and return what they sent, in the order of ranks."""
    received = like.new_empty(sum(incoming))
    parts = [part for parts in outgoing for part in parts]
    sent = torch.cat(parts) if parts else like.new_empty(0)
    ranks.all_to_all(received, sent, list(incoming), list(sizes)).wait()
    return received
