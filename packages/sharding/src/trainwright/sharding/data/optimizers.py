"""Optimizers of PyTorch on pieces: parameter groups for them, and a check that they fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainwright.sharding.data.errors import first_few
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.selection import KnownParameters, Member, Rule
from trainwright.sharding.data.whole_matrices import WholeMatrices
from trainwright.sharding.errors import NotAvailableError, ShardingError

ELEMENT_WISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers whose update of an element depends on nothing but that element's own history."""

NOT_ELEMENT_WISE: Mapping[type[torch.optim.Optimizer], str] = {
    torch.optim.Muon: "orthogonalises whole matrices",
    torch.optim.Adafactor: "keeps sums over whole rows and columns of a matrix",
    torch.optim.LBFGS: "takes inner products over all elements of all parameters",
}
"""Optimizers of PyTorch that need more than elements, and what for."""

_WHY_BY_NAME = {
    "shampoo": "preconditions whole matrices",
    "soap": "preconditions whole matrices",
    "kfac": "preconditions whole matrices",
    "muon": "orthogonalises whole matrices",
    "dion": "orthogonalises whole matrices",
    "galore": "projects whole matrices",
    "adafactor": "keeps sums over whole rows and columns of a matrix",
    "came": "keeps sums over whole rows and columns of a matrix",
    "lamb": "scales by the norms of whole parameters",
    "lars": "scales by the norms of whole parameters",
    "8bit": "quantises blocks of elements together",
}


def parameter_groups(
    parallel: DataParallel,
    groups: Iterable[Mapping[str, Any] | Member] | Rule,
) -> list[dict[str, Any]]:
    """Turn parameter groups of the plain module into the same groups of this rank's pieces.

    ``torch.optim.AdamW(parameter_groups(parallel, groups), lr=...)`` then trains as it would with
    the plain module's groups. Each group lists its pieces' names under ``"param_names"``. Frozen
    and empty parameters are left out; so is what this rank keeps nothing of, but a group stays
    where that leaves it empty: LR schedulers see the same groups on every rank. A tied parameter
    is in its group once.

    A rule decides by the parameter as the plain model has it, so that weight decay by the number
    of dims or a threshold on sizes does not depend on where pieces were cut:
    ``{"params": lambda spec: len(spec.global_shape) >= 2, "weight_decay": 0.1}``.

    Args:
        parallel: Whose pieces.
        groups: As for a PyTorch optimizer: parameters of the module, or dicts with them under
            ``"params"`` and options beside. For parameters their names, (name, parameter) pairs
            or a rule on their specs will do.

    Raises:
        ShardingError: A parameter is unknown or in two groups, or there is no group. On every
            rank alike.
    """
    known = KnownParameters.of(parallel)
    pieces = parallel.pieces
    found: list[dict[str, Any]] = []
    taken: dict[str, int] = {}
    for index, group in enumerate(_as_dicts(groups)):
        if "params" not in group:
            raise ShardingError(f"group {index} has no 'params'; its keys are {sorted(group)}")
        names = known.select(group["params"], f"group {index}")
        for name in names:
            if name in taken:
                raise ShardingError(
                    f"{name} is in groups {taken[name]} and {index}; a parameter belongs to one "
                    "group (a tied parameter is one under all its names)"
                )
            taken[name] = index
        kept = [name for name in names if name in pieces]
        parameters = [pieces[name].parameter for name in kept]
        found.append({**group, "params": parameters, "param_names": kept})
    if not found:
        raise ShardingError("there is no parameter group; give at least one")
    return found


def check_optimizer(
    parallel: DataParallel, *optimizers: torch.optim.Optimizer, element_wise: bool = False
) -> None:
    """Raise unless optimizers update exactly the pieces, each once, in a way that pieces allow.

    Where pieces are cut an optimizer must be element-wise: those of `ELEMENT_WISE` are; those of
    `NOT_ELEMENT_WISE` and their subclasses are not; of any other class, a subclass of the former
    too, the caller must know and say so. `WholeMatrices` runs any optimizer of matrices.

    Args:
        parallel: Whose pieces.
        optimizers: Together they must hold every piece. Frozen parameters of the module are
            allowed: nothing updates them.
        element_wise: Declares optimizers that are not known to be element-wise.

    Raises:
        ShardingError: An optimizer holds parameters of the module that are not what is updated,
            or tensors of something else; a piece is in none or in two (seen by the ranks that
            keep some of it).
        NotAvailableError: An optimizer is not, or not known to be, element-wise.
    """
    if not optimizers:
        raise ShardingError("check_optimizer() needs at least one optimizer")
    if _is_cut(parallel):
        for optimizer in optimizers:
            _check_element_wise(optimizer, declared=element_wise)
    _check_members(parallel, optimizers)


def _as_dicts(groups: object) -> list[Mapping[str, Any]]:
    if callable(groups) or isinstance(groups, (str, torch.Tensor)):
        return [{"params": groups}]
    if isinstance(groups, Mapping):
        raise ShardingError("groups are a list of dicts; write [{'params': ..., ...}]")
    if isinstance(groups, (set, frozenset)):
        raise ShardingError("groups are a set, whose order differs between runs; give a list")
    listed = list(groups)  # type: ignore[call-overload]
    dicts = [group for group in listed if isinstance(group, Mapping)]
    if not dicts:
        return [{"params": listed}] if listed else []
    if len(dicts) < len(listed):
        raise ShardingError(
            "groups mix dicts and parameters; put the parameters into a dict's 'params'"
        )
    return dicts


def _is_cut(parallel: DataParallel) -> bool:
    """Whether pieces are other tensors than whole parameters of the plain model, on any rank."""
    return any(group.num_ranks > 1 for group in parallel.layout) or any(
        tuple(piece.parameter.shape) != piece.spec.global_shape
        for piece in parallel.pieces.values()
    )


def _check_element_wise(optimizer: torch.optim.Optimizer, *, declared: bool) -> None:
    if isinstance(optimizer, WholeMatrices):
        return
    kind = type(optimizer)
    way_out = (
        "use stage 0 without tensor parallelism, or WholeMatrices for matrices and an "
        "element-wise optimizer for the rest"
    )
    for known, why in NOT_ELEMENT_WISE.items():
        if isinstance(optimizer, known):
            raise NotAvailableError(
                f"{kind.__name__} {why}, but pieces are cut through them; {way_out}"
            )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise NotAvailableError("SparseAdam needs sparse gradients, pieces have dense; use Adam")
    if declared or kind in ELEMENT_WISE:
        return
    why = next((why for part, why in _WHY_BY_NAME.items() if part in kind.__name__.lower()), "")
    guess = f" (by its name it {why})" if why else ""
    raise NotAvailableError(
        f"{kind.__name__} is not known to be element-wise{guess}, and pieces are cut through "
        f"parameters; if an element's update depends on that element alone, say "
        f"element_wise=True, else {way_out}"
    )


def _check_members(parallel: DataParallel, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    pieces = {id(piece.parameter): name for name, piece in parallel.pieces.items()}
    ours = {id(parameter): (name, parameter) for name, parameter in _named(parallel)}
    held: set[str] = set()
    originals: list[str] = []
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                if id(tensor) in pieces:
                    name = pieces[id(tensor)]
                    if name in held:
                        raise ShardingError(f"the piece of {name} is in two optimizers; keep one")
                    held.add(name)
                elif id(tensor) not in ours:
                    raise ShardingError(
                        f"group {index} of {type(optimizer).__name__} holds a tensor of shape "
                        f"{tuple(tensor.shape)} that is no piece of this DataParallel; build it "
                        "on parameter_groups(parallel, groups)"
                    )
                elif ours[id(tensor)][1].requires_grad and tensor.numel() > 0:
                    originals.append(ours[id(tensor)][0])
    if originals:
        raise ShardingError(
            f"an optimizer was built on {first_few(originals)} of the module, which it would "
            "update in vain: build it on parameter_groups(parallel, groups), or on the pieces' "
            "parameters"
        )
    missed = [name for name in parallel.pieces if name not in held]
    if missed:
        raise ShardingError(
            f"no optimizer holds the piece of {first_few(missed)}; add it to a group, or freeze "
            "the parameter (requires_grad_(False)) before data_parallel()"
        )


def _named(parallel: DataParallel) -> Iterable[tuple[str, torch.nn.Parameter]]:
    return parallel.module.named_parameters()
