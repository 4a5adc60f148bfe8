"""Collects the pieces of matrices at their owners and hands updated pieces back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import torch
from torch import nn

from trainwright.collectives import Communicator, ShardSpec
from trainwright.sharding.data.matrix_owners import Round, assign_owners, plan_rounds

Update = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], None]
"""Updates whole weights in place, given by name, with their gradients."""


@attrs.frozen(eq=False)
class Matrix:
    """A matrix whose elements the data ranks keep between them.

    Args:
        spec: The whole matrix.
        ranges: For each data rank the elements [start, stop) that it keeps; all of them at
            stage 0, where every rank keeps and owns every matrix.
        parameter: This rank's piece; None where it keeps nothing.
        like: A tensor with the piece's dtype and device.
    """

    spec: ShardSpec
    ranges: tuple[tuple[int, int], ...]
    parameter: nn.Parameter | None
    like: torch.Tensor


class Fleet:
    """The matrices that the same data ranks keep in the same dtype.

    Args:
        matrices: By name, in an order that is the same on every rank.
        data: Joins the data ranks; None where each rank keeps its matrices whole.
        round_bytes: Most bytes of whole weights that a rank holds at once, unless one matrix alone
            is larger.
    """

    def __init__(
        self, matrices: Mapping[str, Matrix], data: Communicator | None, round_bytes: int
    ) -> None:
        self.matrices = dict(matrices)
        self._data = data
        sizes = {name: matrix.spec.total for name, matrix in matrices.items()}
        num_ranks = 1 if data is None else data.size
        self.owners = assign_owners(sizes, num_ranks)
        most = round_bytes // next(iter(matrices.values())).like.element_size()
        self.rounds = plan_rounds(self.owners, sizes, num_ranks, most)

    @property
    def owned(self) -> tuple[str, ...]:
        """The matrices that this rank updates."""
        rank = 0 if self._data is None else self._data.rank
        return tuple(name for name, owner in self.owners.items() if owner == rank)

    def update(self, update: Update) -> None:
        """Let owners update their matrices and every rank have its updated pieces."""
        if self._data is None:
            for share in self.rounds:
                self._update_here(share, update)
            return
        for share in self.rounds:
            self._update_round(share, self._data, update)

    def _update_here(self, share: Round, update: Update) -> None:
        weights: dict[str, torch.Tensor] = {}
        gradients: dict[str, torch.Tensor] = {}
        for name in share.owned[0]:
            matrix = self.matrices[name]
            shape = matrix.spec.local_shape
            assert matrix.parameter is not None
            weights[name] = matrix.parameter.detach().view(shape)
            gradients[name] = _gradient(matrix).view(shape)
        update(weights, gradients)

    def _update_round(self, share: Round, data: Communicator, update: Update) -> None:
        mine = share.owned[data.rank]
        kept = [[self.matrices[name].ranges[data.rank] for name in names] for names in share.owned]
        outgoing = [
            [part for name in names for part in self._kept_parts(name)] for names in share.owned
        ]
        sizes = [2 * sum(stop - start for start, stop in ranges) for ranges in kept]
        # Every rank's two parts of each of my matrices, the gradient's and the weight's.
        incoming = [2 * sum(self._held(name, rank) for name in mine) for rank in range(data.size)]
        received = _swap(data, outgoing, sizes, incoming, self._like)
        whole = {name: self._new_whole(name) for name in mine}
        at = 0
        for rank in range(data.size):
            for name in mine:
                start, stop = self.matrices[name].ranges[rank]
                for tensor in whole[name]:
                    tensor[start:stop] = received[at : at + stop - start]
                    at += stop - start
        del received, outgoing
        shapes = {name: self.matrices[name].spec.local_shape for name in mine}
        update(
            {name: whole[name][1].view(shapes[name]) for name in mine},
            {name: whole[name][0].view(shapes[name]) for name in mine},
        )
        self._hand_back(share, data, {name: weight for name, (_, weight) in whole.items()})

    def _hand_back(
        self, share: Round, data: Communicator, weights: Mapping[str, torch.Tensor]
    ) -> None:
        outgoing = [
            [weights[name][slice(*self.matrices[name].ranges[rank])] for name in weights]
            for rank in range(data.size)
        ]
        sizes = [sum(self._held(name, rank) for name in weights) for rank in range(data.size)]
        incoming = [sum(self._held(name, data.rank) for name in names) for names in share.owned]
        received = _swap(data, outgoing, sizes, incoming, self._like)
        at = 0
        for name in (name for names in share.owned for name in names):
            parameter = self.matrices[name].parameter
            if parameter is not None:
                part = received[at : at + parameter.numel()]
                parameter.detach().view(-1).copy_(part)
                at += parameter.numel()

    def _kept_parts(self, name: str) -> list[torch.Tensor]:
        matrix = self.matrices[name]
        if matrix.parameter is None:
            return []
        return [_gradient(matrix).reshape(-1), matrix.parameter.detach().view(-1)]

    def _held(self, name: str, rank: int) -> int:
        start, stop = self.matrices[name].ranges[rank]
        return stop - start

    def _new_whole(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        numel = self.matrices[name].spec.total
        return self._like.new_empty(numel), self._like.new_empty(numel)

    @property
    def _like(self) -> torch.Tensor:
        return next(iter(self.matrices.values())).like


def _gradient(matrix: Matrix) -> torch.Tensor:
    assert matrix.parameter is not None
    assert matrix.parameter.grad is not None
    return matrix.parameter.grad.detach()


def _swap(
    data: Communicator,
    outgoing: Sequence[Iterable[torch.Tensor]],
    sizes: Sequence[int],
    incoming: Sequence[int],
    like: torch.Tensor,
) -> torch.Tensor:
    """Send to each rank what is for it and return what they sent, in the order of ranks."""
    received = like.new_empty(sum(incoming))
    parts = [part for parts in outgoing for part in parts]
    sent = torch.cat(parts) if parts else like.new_empty(0)
    data.all_to_all(received, sent, list(incoming), list(sizes)).wait()
    return received
