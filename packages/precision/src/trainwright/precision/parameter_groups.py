"""Parameter groups of (name, parameter) pairs, and options that two optimizers share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from trainwright.precision.errors import PrecisionError

NamedParameters = Iterable[tuple[str, torch.Tensor]]
ParameterGroups = Iterable[Mapping[str, Any]]
OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Write options from one optimizer's groups to another's."""
    # Schedulers write into our groups, some optimizers into their own.
    for from_group, to_group in zip(source, target, strict=True):
        options = {k: v for k, v in from_group.items() if k not in ("params", "param_names")}
        to_group.update(options)


def named_groups(parameters: NamedParameters | ParameterGroups) -> list[dict[str, Any]]:
    """Return parameter groups of (name, parameter) pairs.

    Raises:
        PrecisionError: there are no parameters, or some without names or of the same name.
    """
    entries: list[Any] = list(parameters)
    if not entries:
        raise PrecisionError("an optimizer needs at least one parameter, got none")
    if not isinstance(entries[0], Mapping):
        entries = [{"params": entries}]
    groups = []
    for entry in entries:
        pairs = list(entry["params"])
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise PrecisionError(
                "parameters are (name, parameter) pairs; pass model.named_parameters()"
            )
        # Without "param_names" torch takes an empty group for one without names.
        groups.append({"param_names": [], **entry, "params": pairs})
    names = [name for group in groups for name, _ in group["params"]]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise PrecisionError(f"parameter names {twice} appear twice; names must be unique")
    return groups
