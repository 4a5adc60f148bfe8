"""What an optimizer keeps of a parameter, seen from a small one before anything is changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainwright.sharding.errors import NotAvailableError

_SAMPLE = 3


def state_dtypes(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: nn.Parameter
) -> dict[str, torch.dtype]:
    """Return the dtype of each state that has a parameter's shape, by its key.

    The optimizer steps a small parameter with a gradient of zeros; its own parameters, states and
    options stay as they are, and its hooks do not hear of it.

    Raises:
        NotAvailableError: Its step changes its options, so that it cannot be taken in parts, or it
            keeps what is neither a number nor of the parameter's shape.
    """
    sample = nn.Parameter(like.new_zeros((_SAMPLE,) * max(like.dim(), 1)))
    sample.grad = torch.zeros_like(sample)
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    seen = {**options, "params": [sample]}
    name = type(optimizer).__name__
    with _only(optimizer, [seen]), _unheard(optimizer):
        optimizer.step()
        states = optimizer.state.pop(sample, {})
    if any(seen[key] is not value and seen[key] != value for key, value in options.items()):
        raise NotAvailableError(
            f"{name} changes its options as it steps, so that states cannot be updated a few at a "
            "time; leave out offload, or take another optimizer"
        )
    found: dict[str, torch.dtype] = {}
    for key, value in states.items():
        if isinstance(value, torch.Tensor) and value.shape == sample.shape:
            found[key] = value.dtype
        elif isinstance(value, torch.Tensor) and value.dim() > 0:
            raise NotAvailableError(
                f"{name} keeps {key!r} of shape {tuple(value.shape)} of a parameter of shape "
                f"{tuple(sample.shape)}: it is not element-wise, and offloaded states are parts "
                "of parameters; take an optimizer such as AdamW"
            )
    return found


@contextmanager
def stepping_only(
    optimizer: torch.optim.Optimizer, chosen: Sequence[tuple[int, list[nn.Parameter]]]
) -> Iterator[None]:
    """Let an optimizer have these of its parameters only, by the numbers of their groups."""
    groups = [optimizer.param_groups[number] for number, _ in chosen]
    whole = [group["params"] for group in groups]
    try:
        for group, (_, parameters) in zip(groups, chosen, strict=True):
            group["params"] = parameters
        with _only(optimizer, groups):
            yield
    finally:
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = parameters


@contextmanager
def _only(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Iterator[None]:
    whole = optimizer.param_groups
    optimizer.param_groups = groups
    try:
        yield
    finally:
        optimizer.param_groups = whole


@contextmanager
def _unheard(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    whole = {name: getattr(optimizer, name) for name in names}
    try:
        for name in names:
            setattr(optimizer, name, OrderedDict())
        yield
    finally:
        for name, hooks in whole.items():
            setattr(optimizer, name, hooks)
