"""The parameters whose gradients are reduced, and what is asked of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trainwright.collectives.checks import resolve_reduce_dtype
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Communicator, ReduceOp

Parameters = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]

_SHOWN = 3


def trainable(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Return the parameters that are trained, by name, or raise where one cannot be."""
    pairs: Iterable[tuple[str, torch.Tensor]]
    if isinstance(parameters, torch.nn.Module):
        pairs = parameters.named_parameters()
    else:
        pairs = parameters
    found: dict[str, torch.Tensor] = {}
    seen: dict[int, str] = {}
    for name, parameter in pairs:
        if not parameter.requires_grad:
            continue
        if name in found:
            raise UsageError(f"parameter name {name!r} is given twice; names must differ")
        if id(parameter) in seen:
            raise UsageError(
                f"parameters {seen[id(parameter)]!r} and {name!r} are the same tensor; pass it "
                "once, as module.named_parameters() does"
            )
        if not parameter.is_leaf or parameter.layout is not torch.strided:
            raise UsageError(
                f"parameter {name!r} must be a leaf with strided memory, got one that is "
                f"{'a leaf' if parameter.is_leaf else 'computed'} and {parameter.layout}"
            )
        seen[id(parameter)] = name
        found[name] = parameter
    if not found:
        raise UsageError("no parameter is trained: none of those given has requires_grad")
    return found


def frozen(parameters: Parameters) -> list[tuple[str, torch.Tensor]]:
    """Return the names and parameters that are not trained."""
    pairs = parameters.named_parameters() if isinstance(parameters, torch.nn.Module) else parameters
    return [(name, parameter) for name, parameter in pairs if not parameter.requires_grad]


def unfrozen(frozen: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return a complaint about each that is trained by now."""
    return [
        f"{name} was frozen and is trained now, which needs new GradientBuckets"
        for name, parameter in frozen
        if parameter.requires_grad
    ]


def reducible(
    parameters: Parameters, comm: Communicator, op: ReduceOp, reduce_dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Return the trained parameters by name, or raise where they cannot be reduced."""
    if op not in (ReduceOp.AVG, ReduceOp.SUM):
        raise UsageError(f"op={op!r}, but gradients are averaged or summed")
    found = trainable(parameters)
    for name, parameter in found.items():
        if parameter.device != comm.device:
            raise UsageError(
                f"parameter {name!r} is on {parameter.device}, the communicator works on "
                f"{comm.device}; move the module before"
            )
        resolve_reduce_dtype(f"parameter {name!r}", parameter.dtype, op, reduce_dtype)
    return found


def shown(names: Sequence[str]) -> str:
    """Return the first few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
