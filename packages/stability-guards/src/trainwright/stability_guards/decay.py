"""Which parameters weight decay pulls at, by their structure."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from trainwright.stability_guards.errors import GuardError

LogicalNdim = Mapping[str, int] | Callable[[str, torch.Tensor], int]


def decay_groups(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    weight_decay: float,
    *,
    logical_ndim: LogicalNdim | None = None,
    overrides: Mapping[str, bool] | None = None,
    roles: Mapping[str, bool] | None = None,
) -> list[dict[str, Any]]:
    """Part parameters into those that decay and those that do not, as optimizer groups.

    Matrices and greater decay, embeddings among them; vectors and scalars, which are norms and
    biases under whatever name, do not. `decay_roles` looks at the modules instead.

    Args:
        named_parameters: such as ``model.named_parameters()``; a tied one counts once, a frozen
            one not at all.
        weight_decay: decay of the first group.
        logical_ndim: number of dims of the whole parameter where the tensor is a flat shard of it,
            by name or as a function of (name, tensor); without, the tensor's own.
        overrides: ``fnmatch`` pattern of names to whether they decay; the first that matches
            rules.
        roles: whether each parameter decays, by name, in place of the rule about dims.

    Returns:
        Two groups for ``torch.optim``, decaying and not, either perhaps empty so that all ranks
        have the same number; "params" holds (name, parameter) pairs.

    Raises:
        GuardError: the decay is negative, a pattern matches nothing, a name has no dims or role.
    """
    if not weight_decay >= 0.0:
        raise GuardError(f"weight_decay must be from 0, got {weight_decay}")
    once: dict[torch.Tensor, str] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            once.setdefault(parameter, name)
    rules = dict(overrides or {})
    _check_patterns(rules, once.values())
    parts: tuple[list[Any], list[Any]] = ([], [])
    for parameter, name in once.items():
        decays = _ruled(name, rules)
        if decays is None and roles is not None:
            decays = _role(name, roles)
        if decays is None:
            decays = _ndim(name, parameter, logical_ndim) >= 2
        parts[0 if decays else 1].append((name, parameter))
    # Without "param_names" torch takes an empty group for one without names.
    return [
        {"params": params, "param_names": [], "weight_decay": decay}
        for params, decay in zip(parts, (weight_decay, 0.0), strict=True)
    ]


def decay_table(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of parameter groups: decay, shape and name, a line each.

    Args:
        groups: what `decay_groups` returned, or the ``param_groups`` of an optimizer made of it.
    """
    rows = [("weight decay", "shape", "parameter")]
    for group in groups:
        names = group.get("param_names") or []
        for index, entry in enumerate(group["params"]):
            name, parameter = entry if isinstance(entry, tuple) else (names[index], entry)
            shape = "x".join(map(str, parameter.shape)) or "scalar"
            rows.append((f"{group['weight_decay']:g}", shape, name))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"{decay:<{widths[0]}}  {shape:<{widths[1]}}  {name}" for decay, shape, name in rows
    )


def _check_patterns(rules: Mapping[str, bool], names: Iterable[str]) -> None:
    known = list(names)
    for pattern in rules:
        if not fnmatch.filter(known, pattern):
            some = ", ".join(known[:3]) or "(none)"
            raise GuardError(
                f"override {pattern!r} matches none of {len(known)} parameters, such as {some}"
            )


def _ruled(name: str, rules: Mapping[str, bool]) -> bool | None:
    for pattern, decays in rules.items():
        if fnmatch.fnmatchcase(name, pattern):
            return decays
    return None


def _role(name: str, roles: Mapping[str, bool]) -> bool:
    if name not in roles:
        raise GuardError(
            f"roles say nothing of {name}; take them of the model whose parameters are grouped"
        )
    return roles[name]


def _ndim(name: str, parameter: torch.Tensor, logical_ndim: LogicalNdim | None) -> int:
    if logical_ndim is None:
        return parameter.ndim
    if not isinstance(logical_ndim, Mapping):
        return logical_ndim(name, parameter)
    if name not in logical_ndim:
        raise GuardError(
            f"logical_ndim says nothing of {name}; a flat shard does not show its dims"
        )
    return logical_ndim[name]
