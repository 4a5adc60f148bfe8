"""What all ranks must agree on before an update, in one reduction over the world."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs
import torch

from trainwright.collectives import ReduceOp
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh.mesh import Mesh
from trainwright.sharding.norm.sums import count_non_finite, row_norms, sum_rows
from trainwright.sharding.protocol import GradientPiece


@attrs.frozen(eq=False)
class StepTotals:
    """The totals of one step, equal on every rank; float64 tensors on the mesh's device.

    Args:
        norm: The p-norm of the whole gradient, each element of the plain model counted once; not
            finite where an element is not.
        non_finite: How many elements of the gradient are infinite or NaN.
        loss_sum: The summed loss of the global batch.
        tokens: The tokens of the global batch.
        verdicts: ``[num_verdicts]``, how many ranks gave each verdict.
    """

    norm: torch.Tensor
    non_finite: torch.Tensor
    loss_sum: torch.Tensor
    tokens: torch.Tensor
    verdicts: torch.Tensor


def one_norm(
    mesh: Mesh,
    pieces: Iterable[GradientPiece],
    *,
    loss_sum: torch.Tensor | float = 0.0,
    tokens: torch.Tensor | float = 0,
    verdict: int = 0,
    num_verdicts: int = 4,
    p: float = 2.0,
) -> StepTotals:
    """Return the norm of the whole gradient and the totals of the step.

    An element counts on the rank whose coordinate is 0 on every axis where its piece is
    replicated. Every rank joins, also one without pieces. Nothing waits for the device.

    Args:
        mesh: The ranks that take the step.
        pieces: This rank's pieces; ``piece.parameter.grad`` has ``piece.spec.numel`` elements and
            is already reduced. A gradient that is None counts as zero.
        loss_sum: What this rank's stage adds to the loss: zero on stages without the loss. It is
            the same on all tp ranks, and counts on tp coordinate 0.
        tokens: The tokens behind ``loss_sum``, by the same rule.
        verdict: This rank's verdict, in 0..num_verdicts - 1.
        num_verdicts: How many verdicts there are.
        p: The norm: positive; inf is the largest magnitude.

    Raises:
        ShardingError: ``p`` or ``verdict`` is out of range, or a gradient does not have the size
            of its piece.

    Communicates:
        One float64 SUM all-reduce over the world, 8 * (4 + num_verdicts) bytes; for p = inf also
        one MAX all-reduce of 8 bytes.
    """
    if not p > 0:
        raise ShardingError(f"p must be positive, got {p}")
    if not 0 <= verdict < num_verdicts:
        raise ShardingError(f"verdict must be in 0..{num_verdicts - 1}, got {verdict}")
    device = mesh.world.device
    gradients = _counted_gradients(mesh, pieces)
    norms = row_norms(gradients, p, None)
    magnitude = sum_rows(norms, p, device).to(device)  # offloaded gradients are elsewhere
    counts_here = mesh.coordinate("tp") == 0
    totals = torch.zeros(4 + num_verdicts, dtype=torch.float64, device=device)
    totals[0] = magnitude
    totals[1] = count_non_finite(gradients, norms, device)
    totals[2] = loss_sum if counts_here else 0.0
    totals[3] = tokens if counts_here else 0.0
    totals[4 + verdict] = 1.0
    totals = totals.detach()
    works = [mesh.world.all_reduce(totals)]
    if p == math.inf:
        # MAX does not promise to carry NaN; infinity it carries.
        magnitude = magnitude.nan_to_num(nan=math.inf, posinf=math.inf)
        works.append(mesh.world.all_reduce(magnitude, ReduceOp.MAX))
    for work in works:
        work.wait()
    return StepTotals(
        norm=magnitude if p == math.inf else totals[0].pow(1.0 / p),
        non_finite=totals[1],
        loss_sum=totals[2],
        tokens=totals[3],
        verdicts=totals[4:],
    )


def _counted_gradients(mesh: Mesh, pieces: Iterable[GradientPiece]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for piece in pieces:
        gradient = piece.parameter.grad
        if gradient is None:
            continue
        if gradient.numel() != piece.spec.numel:
            raise ShardingError(
                f"{piece.spec.name}: the gradient has {gradient.numel()} elements, the piece "
                f"{piece.spec.numel}; pass each parameter with its own spec"
            )
        if all(mesh.coordinate(axis) == 0 for axis in piece.spec.replicated):
            found.append(gradient)
    return found
