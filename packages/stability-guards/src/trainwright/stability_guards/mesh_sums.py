"""Sums over the elements of DTensors, each counted once on its mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.gradients import as_dtensor, by_kind
from trainwright.stability_guards.powers import join, power_sums


def sums_over_meshes(groups: Sequence[Sequence[torch.Tensor]], norm_type: float) -> torch.Tensor:
    """Return the power sums of each group of DTensors over all ranks of their meshes.

    Args:
        groups: DTensors, at least one in all; the same ones in one order on each rank of a mesh.
        norm_type: p, positive or ``math.inf``.

    Returns:
        [groups, 1 or 2] float64, as `power_sums`, the same on all ranks of a mesh.

    Raises:
        GuardError: this rank is not in the mesh of one of them.

    Communicates:
        One all-reduce for each dim of a mesh along which one of them is cut, and the reduction of
        those that are partial sums.
    """
    by_mesh: dict[Any, list[list[Any]]] = {}
    for index, group in enumerate(groups):
        for tensor in map(as_dtensor, group):
            lists = by_mesh.setdefault(tensor.device_mesh, [[] for _ in groups])
            lists[index].append(_reduced(tensor))
    total: torch.Tensor | None = None
    for mesh, lists in by_mesh.items():
        sums = _sums_on_mesh(mesh, lists, norm_type)
        total = sums if total is None else join(total, sums.to(total.device), norm_type)
    assert total is not None
    return total


def _reduced(tensor: Any) -> Any:
    """Return the tensor with partial sums added up: a norm is not the sum of theirs."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if at.is_partial() else at for at in tensor.placements]
    return tensor.redistribute(placements=whole)


def _sums_on_mesh(mesh: Any, groups: list[list[Any]], norm_type: float) -> torch.Tensor:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise GuardError(
            f"rank {dist.get_rank()} is not in {mesh}, on which a gradient lies; clip it on the "
            "ranks of its mesh"
        )
    everyone = [tensor for group in groups for tensor in group]
    cut = [
        dim
        for dim in range(mesh.ndim)
        if any(not tensor.placements[dim].is_replicate() for tensor in everyone)
    ]
    device = everyone[0].to_local().device
    rows = []
    for group in groups:
        # Along a dim that is summed over, what is replicated counts at coordinate 0 only.
        counted = [
            tensor.to_local()
            for tensor in group
            if all(coordinate[d] == 0 or not tensor.placements[d].is_replicate() for d in cut)
        ]
        rows.append(power_sums(by_kind(counted), norm_type, device))
    sums = torch.stack(rows)
    op = dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM
    for dim in cut:
        dist.all_reduce(sums, op, group=mesh.get_group(dim))
    return sums
