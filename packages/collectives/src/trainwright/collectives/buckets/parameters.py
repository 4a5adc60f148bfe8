"""The parameters whose gradients are reduced, and what is asked of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trainwright.collectives.checks import resolve_reduce_dtype
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Communicator, ReduceOp

Parameters = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]

_SHOWN = 5


def named(parameters: Parameters) -> list[tuple[str, torch.Tensor]]:
    """Return names and parameters, or raise where something else is given."""
    if isinstance(parameters, torch.nn.Module):
        return list(parameters.named_parameters())
    if not isinstance(parameters, Iterable):
        raise UsageError(f"pass a module or its named_parameters(), got {parameters!r}")
    pairs = list(parameters)
    for pair in pairs:
        is_pair = isinstance(pair, Sequence) and len(pair) == 2
        if not is_pair or not (isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)):
            raise UsageError(
                "pass a module or its named_parameters(), pairs of a name and a parameter, got a "
                f"{type(pair).__name__} among them"
            )
    return pairs


def trainable(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Return the parameters that are trained, by name, or raise where one cannot be."""
    found: dict[str, torch.Tensor] = {}
    seen: dict[int, str] = {}
    for name, parameter in named(parameters):
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
        grad_dtype = parameter.grad_dtype  # None: any
        if grad_dtype not in (None, parameter.dtype):
            raise UsageError(
                f"parameter {name!r} is {parameter.dtype} and its grad_dtype {grad_dtype}; buckets "
                "hold gradients in the parameter's dtype; reduce_dtype says what is added in"
            )
    return found


def shown(texts: Sequence[str], separator: str = ", ") -> str:
    """Return the first few of many texts."""
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return separator.join(texts[:_SHOWN]) + more
