"""A debug check: tensors that are declared replicated hold the same bits on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch
from torch import nn

from trainwright.collectives import Communicator, ReduceOp
from trainwright.sharding.errors import ReplicaMismatchError
from trainwright.sharding.mesh.mesh import Mesh
from trainwright.sharding.placement.parameters import ParameterPlacement, placements_of

_AT_ONCE = 1 << 20
# Odd constants of a 64-bit mixing step (splitmix64), as signed integers.
_SPREAD = -7046029254386353131
_MIX = -4658895280553007687


def check_replicated(mesh: Mesh, tensors: Mapping[str, torch.Tensor], axes: Iterable[str]) -> None:
    """Raise unless each tensor holds the same bits on all ranks along ``axes``.

    For debugging: it reads every tensor and waits for the result.

    Args:
        mesh: The mesh.
        tensors: The same names, shapes and dtypes on every rank along ``axes``.
        axes: The axes on which the tensors are declared replicated.

    Raises:
        ReplicaMismatchError: On every rank along ``axes`` alike, naming the first tensor that
            differs and the ranks of the world that disagree.

    Communicates:
        One all-reduce of 16 bytes a tensor along ``axes``; where one differs, an all-gather of 8
        bytes a rank.
    """
    named = tuple(axes)
    if not tensors or not named or mesh.size(*named) == 1:
        return
    comm = mesh.communicator(*named)
    mine = torch.stack([checksum(tensor) for tensor in tensors.values()]).to(comm.device)
    found = first_difference(mine, comm)
    if found is not None:
        raise ReplicaMismatchError(
            f"{list(tensors)[found.position]} is declared replicated on {', '.join(named)}, but "
            f"these differ: {found.groups(mesh.ranks(*named))}. Its gradient is missing a "
            "reduction, or it was changed outside of training"
        )


def check_replicated_parameters(
    model: nn.Module,
    mesh: Mesh,
    placements: Mapping[str, ParameterPlacement] | None = None,
) -> None:
    """Raise unless every parameter holds the same bits wherever it is declared replicated.

    Args:
        model: This rank's module.
        mesh: The mesh.
        placements: By name; None means `placements_of` the model.

    Raises:
        ReplicaMismatchError: As in `check_replicated`.

    Communicates:
        As `check_replicated`, for each distinct set of replicated axes.
    """
    known = placements_of(model) if placements is None else placements
    by_axes: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        by_axes.setdefault(known[name].replicated_axes, {})[name] = parameter
    for axes in sorted(by_axes):
        check_replicated(mesh, by_axes[axes], axes)


@attrs.frozen
class Difference:
    """The first of several numbers that is not the same on all ranks.

    Args:
        position: Which it is.
        values: What each rank has there.
    """

    position: int
    values: tuple[int, ...]

    def groups(self, ranks: Iterable[int]) -> str:
        """Return which of ``ranks`` hold one value, and which another, as text."""
        holders: dict[int, list[int]] = {}
        for rank, value in zip(ranks, self.values, strict=True):
            holders.setdefault(value, []).append(rank)
        return "; ".join(f"ranks {_listed(group)}" for group in holders.values())


def first_difference(numbers: torch.Tensor, comm: Communicator) -> Difference | None:
    """Return the first of the int64 ``numbers`` that is not the same on all ranks, None if all are.

    Its memory does not grow with the number of ranks unless they differ. Waits for the result.

    Communicates:
        One all-reduce of 16 bytes a number; where one differs, an all-gather of 8 bytes a rank.
    """
    count = numbers.numel()
    # The complement turns the order round, so that one maximum gives both ends.
    both = torch.cat([numbers, ~numbers])
    comm.all_reduce(both, ReduceOp.MAX).wait()
    at: list[int] = (both[:count] != ~both[count:]).nonzero()[:1].flatten().tolist()
    if not at:
        return None
    values = numbers.new_empty(comm.size)
    comm.all_gather(values, numbers[at[0] : at[0] + 1].clone()).wait()
    return Difference(at[0], tuple(values.tolist()))


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int64 that depends on every bit of a tensor's elements and on their order."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        at = torch.arange(start, start + part.numel(), device=flat.device)
        # Integer sums wrap around; the place enters, so that exchanged elements are seen.
        mixed = (_bits(part) + at * _SPREAD) * _MIX
        total += ((mixed ^ (mixed >> 29)) * _SPREAD).sum()
    return total


def _bits(flat: torch.Tensor) -> torch.Tensor:
    if flat.dtype == torch.bool:
        return flat.to(torch.int64)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(integers[flat.element_size()]).to(torch.int64)


def _listed(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
