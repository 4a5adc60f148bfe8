"""Which collective takes an activation from one placement to another, as data and as action.

A gradient is placed too. The gradient of a replicated or partial activation is replicated, that of
a shard is sharded; only where a replicated activation goes on into work of which each rank does
another part is its gradient partial, and the plan is told so.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from trainwright.collectives import Communicator, differentiable
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh.mesh import Mesh
from trainwright.sharding.mesh.shape import AXES
from trainwright.sharding.placement.partial import axes_of, mark_partial, terms_of
from trainwright.sharding.placement.values import Partial, Placement, Replicate, Shard

Placements = Mapping[str, Placement]


@attrs.frozen
class Transition:
    """One change of placement on one axis.

    Args:
        axis: The mesh axis.
        source: Before.
        target: After.
        partial_gradient: Whether the ranks' gradients of a replicated target are terms of a sum.
    """

    axis: str
    source: Placement
    target: Placement
    partial_gradient: bool = False

    @property
    def forward_collective(self) -> str | None:
        """The collective of the forward, None where nothing is sent."""
        return _collective(self.source, self.target)

    @property
    def backward_collective(self) -> str | None:
        """The collective of the backward, None where nothing is sent."""
        given = Partial() if self.partial_gradient else _dual(self.target)
        return _collective(given, _dual(self.source))


def plan_redistribution(
    source: Placements, target: Placements, gradient: Placements | None = None
) -> tuple[Transition, ...]:
    """Return the transitions, in order, that take an activation from source to target.

    Where several axes shard one dim, the outer axis cuts first, so parts are joined from the inner
    axis outwards and cut from the outer axis inwards; a shard inside one that changes is joined
    and cut again.

    Args:
        source: Placement by axis; an axis that is absent is `Replicate`.
        target: Likewise.
        gradient: ``{axis: Partial()}`` where the target is replicated on the axis and each rank
            goes on with other work, so that the ranks' gradients must be summed.

    Raises:
        ShardingError: An axis is unknown, or ``gradient`` says something else.
    """
    partial_gradients = _partial_axes(target, gradient or {})
    order = sorted({*source, *target, *partial_gradients}, key=_position)
    state: dict[str, Placement] = {axis: source.get(axis, Replicate()) for axis in order}
    goal: dict[str, Placement] = {axis: target.get(axis, Replicate()) for axis in order}
    plan: list[Transition] = []

    def go(axis: str, placement: Placement) -> None:
        final = axis in partial_gradients and placement == goal[axis]
        plan.append(Transition(axis, state[axis], placement, final))
        state[axis] = placement
        partial_gradients.difference_update({axis} if final else ())

    for axis in reversed(order):
        outer = order[: order.index(axis)]
        if not isinstance(state[axis], Shard) or not _must_go(axis, outer, state, goal):
            continue
        direct = not isinstance(goal[axis], Shard) or _may_move(axis, outer, state, goal)
        go(axis, goal[axis] if direct else Replicate())
    for axis in order:
        if state[axis] != goal[axis] or axis in partial_gradients:
            go(axis, goal[axis])
    return tuple(plan)


def redistribute(
    tensor: torch.Tensor,
    mesh: Mesh,
    source: Placements,
    target: Placements,
    *,
    gradient: Placements | None = None,
) -> torch.Tensor:
    """Take an activation from one placement to another; autograd goes the way back.

    Args:
        tensor: This rank's part under ``source``; a `PartialTensor` is one where ``source`` says
            so, and the result is one again on the axes where it is still partial.
        mesh: The mesh whose axes are named.
        source: As in `plan_redistribution`.
        target: As in `plan_redistribution`.
        gradient: As in `plan_redistribution`.

    Returns:
        This rank's part under ``target``; the tensor itself where nothing changes.

    Raises:
        ShardingError: As in `plan_redistribution`, or ``tensor`` is marked as partial on an axis
            where ``source`` is not.

    Communicates:
        One collective a transition, as `Transition.forward_collective` and `backward_collective`
        say; none on axes of size 1.
    """
    _check_marks(tensor, source)
    for transition in plan_redistribution(source, target, gradient):
        tensor = apply_transition(tensor, transition, mesh.communicator(transition.axis))
    return tensor


def apply_transition(
    tensor: torch.Tensor, transition: Transition, comm: Communicator
) -> torch.Tensor:
    """Take an activation through one transition over the communicator of its axis.

    A `PartialTensor` stays one on the axes where it is not reduced.
    """
    marked = axes_of(tensor)
    if marked:
        axis = transition.axis
        _check_marks(tensor, {other: Partial() for other in marked} | {axis: transition.source})
        left = {*marked, axis} if transition.target == Partial() else {*marked} - {axis}
        result = apply_transition(terms_of(tensor), transition, comm)
        return mark_partial(result, *sorted(left, key=_position)) if left else result
    if comm.size == 1:
        return tensor
    match transition.source, transition.target:
        case Replicate(), Replicate() if transition.partial_gradient:
            return differentiable.replicate_to_partial(tensor, comm)
        case Replicate(), Shard(dim):
            return differentiable.replicate_to_shard(tensor, comm, dim)
        case Replicate(), Partial():
            return _keep_on_first(tensor, comm)
        case Shard(dim), Replicate() if transition.partial_gradient:
            return differentiable.shard_to_partial(tensor, comm, dim)
        case Shard(dim), Replicate():
            return differentiable.shard_to_replicate(tensor, comm, dim)
        case Shard(dim), Shard(new_dim) if dim != new_dim:
            return _move_shard(tensor, comm, dim, new_dim)
        case Shard(dim), Partial():
            return _pad_with_zeros(tensor, comm, dim)
        case Partial(), Replicate() if transition.partial_gradient:
            return differentiable.all_reduce(tensor, comm)
        case Partial(), Replicate():
            return differentiable.partial_to_replicate(tensor, comm)
        case Partial(), Shard(dim):
            return differentiable.partial_to_shard(tensor, comm, dim)
    return tensor


def _check_marks(tensor: torch.Tensor, source: Placements) -> None:
    for axis in axes_of(tensor):
        placement = source.get(axis, Replicate())
        if placement != Partial():
            raise ShardingError(
                f"the tensor is partial over {axis}, but its source there is {placement}; say "
                f"{{{axis!r}: Partial()}}, so that it is reduced"
            )


def _dual(placement: Placement) -> Placement:
    return placement if isinstance(placement, Shard) else Replicate()


def _collective(source: Placement, target: Placement) -> str | None:
    match source, target:
        case Shard(dim), Shard(new_dim):
            return None if dim == new_dim else "all_to_all"
        case Shard(), Replicate():
            return "all_gather"
        case Partial(), Replicate():
            return "all_reduce"
        case Partial(), Shard():
            return "reduce_scatter"
    return None


def _position(axis: str) -> int:
    if axis not in AXES:
        raise ShardingError(f"unknown axis {axis!r}; the axes are {', '.join(AXES)}")
    return AXES.index(axis)


def _partial_axes(target: Placements, gradient: Placements) -> set[str]:
    for axis, placement in gradient.items():
        value = target.get(axis, Replicate())
        if placement != _dual(value) and (placement, value) != (Partial(), Replicate()):
            raise ShardingError(
                f"on {axis} the target is {value}, so its gradient cannot be {placement}; "
                "only a replicated target's gradient is a choice: Replicate() or Partial()"
            )
    return {axis for axis, placement in gradient.items() if placement == Partial()}


def _must_go(
    axis: str, outer: list[str], state: dict[str, Placement], goal: dict[str, Placement]
) -> bool:
    """Say whether a shard has to be given up: it changes, or one that it is cut from does."""
    changing = [other for other in outer if state[other] != goal[other]]
    here = state[axis]
    return here != goal[axis] or any(here in (state[other], goal[other]) for other in changing)


def _may_move(
    axis: str, outer: list[str], state: dict[str, Placement], goal: dict[str, Placement]
) -> bool:
    """Say whether a shard can go straight to its new dim: no outer axis has still to cut there.

    An inner axis that cuts there has been undone before, as an outer one changes.
    """
    new = goal[axis]
    if state[axis] == new:
        return False
    return all((state[other] == new) == (goal[other] == new) for other in outer)


def _move_shard(tensor: torch.Tensor, comm: Communicator, dim: int, new_dim: int) -> torch.Tensor:
    if tensor.shape[new_dim] % comm.size:
        raise ShardingError(
            f"dim {new_dim} of shape {tuple(tensor.shape)} cannot be cut over {comm.size} ranks"
        )
    shape = tensor.shape
    cut = (*shape[:new_dim], comm.size, shape[new_dim] // comm.size, *shape[new_dim + 1 :])
    parts = tensor.reshape(cut).movedim(new_dim, 0)
    received = differentiable.all_to_all(parts, comm)
    return received.movedim(0, dim).flatten(dim, dim + 1)


def _pad_with_zeros(tensor: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    size = tensor.shape[dim]
    padding = [0, 0] * (tensor.ndim - 1 - dim)
    padding += [comm.rank * size, (comm.size - 1 - comm.rank) * size]
    return torch.nn.functional.pad(tensor, padding)


def _keep_on_first(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    kept: torch.Tensor = _KeepOnFirst.apply(  # type: ignore[no-untyped-call]
        tensor, comm.rank == 0
    )
    return kept


class _KeepOnFirst(torch.autograd.Function):
    """Terms of a sum out of a replicated tensor; each rank knows the gradient of the sum."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, tensor: torch.Tensor, first: bool
    ) -> torch.Tensor:
        return tensor.clone() if first else torch.zeros_like(tensor)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        return gradients[0], None
