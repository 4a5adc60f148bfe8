"""Finds what should be equal on several ranks and is not: a flipped bit, an edit on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.sharding.data.agreement import agree
from trainwright.sharding.data.errors import first_few
from trainwright.sharding.data.held import HeldTensor, held_tensors, named_tensors
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.errors import ReplicaMismatchError
from trainwright.sharding.mesh import EXPERT_AXES, HYBRID_AXES, Mesh
from trainwright.sharding.mesh.axes import STAGE_AXES
from trainwright.sharding.placement.replicas import checksum

_SHOWN = 3


def check_replicas(parallel: DataParallel) -> None:
    """Raise unless weights, masters, frozen parameters and buffers have equal bits on all replicas.

    For now and then, between two steps: it reads every tensor once and waits for the result.
    Weights that are cut are compared where their ranges are repeated.

    Args:
        parallel: The model; all ranks of the mesh call it.

    Raises:
        ReplicaMismatchError: On all ranks alike, naming tensors and the ranks that hold one value
            against those that hold another.

    Communicates:
        One all-gather of at most 24 bytes a tensor over the ranks of each pipeline stage, for
        weights tied over stages one between these, and an all-reduce of 8 bytes over the world.
    """
    mesh = parallel.mesh
    items = list(_items(parallel))
    problems = _compare(items, mesh.communicator(*STAGE_AXES), mesh.ranks(*STAGE_AXES), mesh)
    tied = [item for item in items if "pp" in item.axes]
    if tied:
        ends = mesh.ranks("pp")[:: mesh.size("pp") - 1]
        problems += _compare(tied, mesh.communicator("pp_ends"), ends, mesh)
    text = None
    if problems:
        more = f"; {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        text = (
            f"replicas differ: {'; '.join(problems[:_SHOWN])}{more}. A gradient is missing a "
            "reduction, or a rank's memory was changed outside of training; load a checkpoint"
        )
    agree(mesh.world, text, ReplicaMismatchError)


@attrs.frozen(eq=False)
class _Item:
    """A tensor, None where this rank holds nothing of it, and the axes where it is repeated."""

    label: str
    tensor: torch.Tensor | None
    axes: tuple[str, ...]


def _items(parallel: DataParallel) -> Iterator[_Item]:
    """Yield what is compared, as many items on every rank of a pipeline stage."""
    held = {item.name: item for item in held_tensors(parallel)}
    parameters = {id(parameter) for parameter in parallel.module.parameters()}
    for names, tensor in named_tensors(parallel.module):
        name = next(iter(names))
        kind = "parameter" if id(tensor) in parameters else "buffer"
        item = held.get(name)
        if item is None:
            yield _Item(name, None, ())
        else:
            is_master = name in parallel.pieces
            label = f"the masters of {name}" if is_master else f"{kind} {name}"
            yield _Item(label, item.tensor, item.spec.replicated)
    yield from _weights(parallel, held)


def _weights(parallel: DataParallel, held: Mapping[str, HeldTensor]) -> Iterator[_Item]:
    """Yield the module's own weights where they are memory apart from the masters."""
    keys = {
        part.name: group.key
        for group in parallel.layout
        for bucket in group.buckets
        for part in bucket.parameters
    }
    for unit in parallel.units.values():
        for bucket in unit.buckets:
            weights = bucket.weights
            names = [member.name for member in bucket.members]
            if weights.is_cut and weights.separate_masters:
                axes = [held[name].spec.replicated for name in names if name in held]
                kept = weights.kept if axes else None
                yield _Item(f"the weights of {first_few(names)}", kept, axes[0] if axes else ())
            elif not weights.is_cut and weights.full is not weights.masters:
                for member in bucket.members:
                    everywhere = keys[member.name].replicated_axes
                    yield _Item(f"the weights of {member.name}", member.weight, everywhere)


def _compare(
    items: Sequence[_Item], comm: Communicator, ranks: Sequence[int], mesh: Mesh
) -> list[str]:
    if comm.size == 1 or not items:
        return []
    zero = torch.zeros((), dtype=torch.int64, device=comm.device)
    mine = torch.stack([zero if i.tensor is None else checksum(i.tensor) for i in items])
    gathered = mine.new_empty(comm.size * len(items))
    comm.all_gather(gathered, mine.to(comm.device)).wait()
    by_rank = dict(zip(ranks, gathered.view(comm.size, -1).tolist(), strict=True))
    problems: list[str] = []
    for position, item in enumerate(items):
        fixed = _fixed_places(mesh, mesh.rank, item.axes)
        holders: dict[int, list[int]] = {}
        for rank, sums in by_rank.items():
            if _fixed_places(mesh, rank, item.axes) == fixed:
                holders.setdefault(sums[position], []).append(rank)
        if len(holders) > 1:
            groups = (f"ranks {', '.join(map(str, group))}" for group in holders.values())
            problems.append(f"{item.label} on {' against '.join(groups)}")
    return problems


def _fixed_places(mesh: Mesh, rank: int, axes: Sequence[str]) -> list[int]:
    """Return a rank's places on the axes along which its part is another one."""
    repeated = {*axes, *(("dp_replicate", "dp_shard") if "dp" in axes else ())}
    view = EXPERT_AXES if repeated & set(EXPERT_AXES[1:]) else HYBRID_AXES
    places = mesh.shape.places(rank)
    return [places[axis] for axis in view if axis not in repeated]
