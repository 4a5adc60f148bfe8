"""Which ranks keep which matrices between them, and what each of them keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from trainwright.collectives import Box, Communicator, ShardSpec
from trainwright.sharding.data.axes import DataAxes
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.matrix_exchange import Fleet
from trainwright.sharding.data.matrix_parts import Matrix, matrices_of
from trainwright.sharding.data.parameters import ModelParameter
from trainwright.sharding.data.selection import trained_parameters
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.placement import Shard

Boxes = tuple[Box, ...]


def plan_fleets(
    parallel: DataParallel, names: Sequence[str], *, stacked: bool, round_bytes: int
) -> list[Fleet]:
    """Return the matrices by the ranks that keep them, and their owners.

    Args:
        parallel: Whose pieces.
        names: Of the parameters, the same on every rank of the stage.
        stacked: Whether a parameter of more than two dims is a stack of matrices.
        round_bytes: As in `Fleet`.

    Raises:
        ShardingError: The ranks do not keep each element of a matrix once; all of these raise it.

    Communicates:
        Over each set of ranks that keep matrices between them, two all-gathers of some tens of
        bytes a matrix.
    """
    trained = trained_parameters(parallel)
    drafts: dict[tuple[tuple[str, ...], torch.dtype], list[Matrix]] = {}
    for name in names:
        axes, matrices = _draft(parallel, trained[name], stacked=stacked)
        drafts.setdefault((axes, trained[name].master_dtype), []).extend(matrices)
    device = next(parallel.module.parameters()).device
    fleets: list[Fleet] = []
    for (axes, dtype), matrices in drafts.items():
        ranks = parallel.mesh.communicator(*axes) if axes else None
        told = [[matrix.boxes for matrix in matrices]]
        if ranks is not None:
            told = _tell(matrices, ranks)
        held = {matrix.label: [rank[at] for rank in told] for at, matrix in enumerate(matrices)}
        _check_complete(matrices, held)
        like = torch.empty(0, dtype=dtype, device=device)
        fleet = {matrix.label: matrix for matrix in matrices}
        fleets.append(Fleet(fleet, held, ranks, like, round_bytes))
    return fleets


def _draft(
    parallel: DataParallel, entry: ModelParameter, *, stacked: bool
) -> tuple[tuple[str, ...], list[Matrix]]:
    """Return the axes whose ranks keep a parameter between them, and what is whole of it."""
    mesh, shape = parallel.mesh, entry.placement.global_shape
    data_axes = DataAxes(mesh, parallel._flat.stage)
    is_cut = parallel._flat.stage > 0
    data = data_axes.cut_axes(entry.key) if is_cut else ()
    # Along the dims of a stack ranks have other matrices, not other parts of them.
    num_lead = max(len(shape) - 2, 0) if stacked else 0
    others = [
        axis
        for axis, place in entry.placement.weight.items()
        if isinstance(place, Shard) and place.dim >= num_lead
    ]
    axes = tuple(axis for axis in (*data, *others) if mesh.size(axis) > 1)
    whole = ShardSpec.full(entry.name, shape, entry.spec.replicated)
    if is_cut:
        whole = data_axes.cut(whole, entry.key)
    piece = parallel.pieces.get(entry.name)
    matrices = matrices_of(entry.spec, whole, piece, stacked=stacked)
    return axes, list(matrices)


def _tell(matrices: Sequence[Matrix], ranks: Communicator) -> list[list[Boxes]]:
    """Return what each rank keeps of each matrix."""
    mine = np.fromiter(_statement(matrices), dtype=np.int64)
    sizes = torch.zeros(ranks.size, dtype=torch.int64, device=ranks.device)
    ranks.all_gather(sizes, torch.tensor([len(mine)], device=ranks.device)).wait()
    longest = int(sizes.max())
    said = torch.zeros(longest, dtype=torch.int64)
    said[: len(mine)] = torch.from_numpy(mine)
    heard = torch.zeros(ranks.size * longest, dtype=torch.int64, device=ranks.device)
    ranks.all_gather(heard, said.to(ranks.device)).wait()
    return [_understand(matrices, rank.tolist()) for rank in heard.view(ranks.size, -1).cpu()]


def _statement(matrices: Sequence[Matrix]) -> Iterator[int]:
    for matrix in matrices:
        yield len(matrix.boxes)
        for box in matrix.boxes:
            yield from box.start
            yield from box.stop


def _understand(matrices: Sequence[Matrix], numbers: Sequence[int]) -> list[Boxes]:
    told: list[Boxes] = []
    at = 0
    for matrix in matrices:
        num_dims = len(matrix.shape)
        count = numbers[at]
        at += 1
        boxes: list[Box] = []
        for _ in range(count):
            middle, end = at + num_dims, at + 2 * num_dims
            boxes.append(Box(tuple(numbers[at:middle]), tuple(numbers[middle:end])))
            at = end
        told.append(tuple(boxes))
    return told


def _check_complete(matrices: Sequence[Matrix], held: dict[str, list[Boxes]]) -> None:
    for matrix in matrices:
        kept = sum(box.numel for boxes in held[matrix.label] for box in boxes)
        if kept != matrix.numel:
            raise ShardingError(
                f"{matrix.label} has {matrix.numel} elements, of which its ranks keep {kept}: its "
                "placement does not say along which axes it is cut; name them in its weight"
            )
