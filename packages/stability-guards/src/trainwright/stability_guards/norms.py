"""The norm of gradients that lie on several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.stability_guards.gradients import (
    Kinds,
    all_local_values,
    by_kind,
    is_dtensor,
    local_values,
)
from trainwright.stability_guards.mesh_sums import sums_over_meshes
from trainwright.stability_guards.powers import join, norm_from, power_sums


def global_norm(
    gradients: Sequence[torch.Tensor], norm_type: float, communicator: Communicator | None
) -> torch.Tensor:
    """Return the p-norm of all ranks' gradients, taken as one vector.

    Args:
        gradients: this rank's part; it may be empty. DTensors count once over their mesh, sparse
            ones hold each index once.
        norm_type: p, positive or ``math.inf``.
        communicator: the ranks; None for this process alone. Where DTensors are given, the ranks
            beyond their meshes, each of which holds others.

    Returns:
        0-d float64 tensor, the same on every rank; infinite or NaN where a gradient is.

    Communicates:
        One all-reduce of 8 bytes (SUM of p-th powers), or 16 (MAX) for the infinity norm; for
        DTensors first one of them for each dim of a mesh along which one is cut, and the sums of
        gradients that are partial.
    """
    return norm_of_parts(gradients, (), norm_type, communicator)


def norm_of_parts(
    differing: Sequence[torch.Tensor],
    alike: Sequence[torch.Tensor],
    norm_type: float,
    communicator: Communicator | None,
    kinds: Kinds | None = None,
) -> torch.Tensor:
    """Return the norm as `global_norm` does of gradients some of which all ranks hold alike.

    Those that are ``alike`` count on rank 0 only; as DTensors they still take part in what their
    mesh communicates. ``kinds`` are all of them, where they are known to be plain.
    """
    everything = [*differing, *alike]
    counts_alike = communicator is None or communicator.rank == 0
    placed: list[list[torch.Tensor]] = []
    if kinds is None:
        placed = [[t for t in group if is_dtensor(t)] for group in (differing, alike)]
    if kinds is None or (alike and not counts_alike):
        counted = everything if counts_alike else differing
        kinds = by_kind(all_local_values(t for t in counted if not is_dtensor(t)))
    if communicator is not None:
        device = communicator.device
    else:
        device = local_values(everything[0]).device if everything else torch.device("cpu")
    sums = power_sums(kinds, norm_type, device)
    if any(placed):
        rows = sums_over_meshes(placed, norm_type).to(device)
        sums = join(sums, rows[0], norm_type)
        sums = join(sums, rows[1], norm_type) if counts_alike else sums
    if communicator is not None:
        op = ReduceOp.MAX if norm_type == math.inf else ReduceOp.SUM
        communicator.all_reduce(sums, op).wait()
    return norm_from(sums, norm_type)


def counted_on(
    coordinates: Mapping[str, int], replicated: Callable[[torch.Tensor], Iterable[str]]
) -> Callable[[torch.Tensor], bool]:
    """Return the ``sharded`` argument for ranks that form a mesh of several axes.

    A parameter counts on the ranks whose coordinate is 0 on every axis along which it is
    replicated, so each of its elements counts once whatever the axes it is cut along.

    Args:
        coordinates: place of this rank on each axis; rank 0 of the communicator has zeros.
        replicated: names of the axes along which all ranks hold the same elements of a parameter,
            such as ``ShardSpec.replicated``.
    """

    def counts(parameter: torch.Tensor) -> bool:
        return all(coordinates[axis] == 0 for axis in replicated(parameter))

    return counts
