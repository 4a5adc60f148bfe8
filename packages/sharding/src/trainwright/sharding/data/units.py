"""Units: which parameters are gathered and reduced together, chosen by a rule on modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import attrs
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

UnitRule = Callable[[str, nn.Module], bool]
"""Says of a module, given its name in the model, whether it is a unit."""

ROOT = ""
"""The name of the unit of everything that no chosen module holds."""


@attrs.frozen(eq=False)
class UnitPlan:
    """A unit before anything is moved.

    Args:
        name: The module's first name in the model; "" is the model itself.
        module: The module that runs with these parameters.
        parameters: First names of the parameters in it, in the order of registration.
    """

    name: str
    module: nn.Module
    parameters: tuple[str, ...]


def by_class(*classes: type[nn.Module]) -> UnitRule:
    """Return a rule that chooses the modules of the given classes and their subclasses."""
    return lambda name, module: isinstance(module, classes)


def by_name(*patterns: str) -> UnitRule:
    """Return a rule that chooses modules by name; ``*`` stands for part of one dotted level.

    ``"layers.*"`` chooses ``layers.0`` and ``layers.1``, not ``layers.0.attention``.
    """
    split = [pattern.split(".") for pattern in patterns]

    def rule(name: str, module: nn.Module) -> bool:
        levels = name.split(".")
        return any(
            len(levels) == len(pattern) and all(map(fnmatchcase, levels, pattern))
            for pattern in split
        )

    return rule


def by_size(min_parameters: int) -> UnitRule:
    """Return a rule that chooses the innermost modules that hold enough parameters.

    A module's own count leaves out what modules chosen inside it hold. Containers that never run
    themselves (``nn.ModuleList``, ``nn.ModuleDict``) are never chosen, nor is the output layer of
    ``nn.MultiheadAttention``, which reads its weight without running it.

    Args:
        min_parameters: Elements a unit has at least; what is left over belongs to an outer unit.
    """

    def count(module: nn.Module) -> int:
        own = {id(p): p.numel() for p in module.parameters(recurse=False)}
        total = sum(own.values())
        for child in module.children():
            left = count(child)
            if left < min_parameters or not runs(child):
                total += left  # not a unit: it belongs to what is around it
        return total

    return lambda name, module: runs(module) and count(module) >= min_parameters


def runs(module: nn.Module) -> bool:
    """Return whether a module has a forward of its own, around which hooks can act."""
    # nn.MultiheadAttention reads the weight of its output layer, which is of this class, itself.
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def plan_units(
    model: nn.Module, rule: UnitRule | None, alone: Iterable[str] = ()
) -> list[UnitPlan]:
    """Assign every parameter of a model to a unit.

    A parameter belongs to the innermost chosen module that lies on every path to it: one that
    modules of two units share belongs to a unit that holds both, mostly the root.

    Args:
        model: The model.
        rule: Chooses modules; None chooses none.
        alone: First names of parameters that are a unit each, named as the parameter.

    Returns:
        The units that hold a parameter, outer ones before those nested in them.
    """
    chosen = {id(model): ROOT}
    modules = {ROOT: model}
    for name, module in model.named_modules():
        if rule is not None and module is not model and rule(name, module):
            chosen[id(module)] = name
            modules[name] = module
    alone = set(alone)
    members: dict[str, list[str]] = {name: [] for name in modules}
    for name, paths in _paths_of(model).items():
        holder = _innermost(paths, chosen)
        if name in alone:
            members[name] = [name]
            # Not the module that registers it: another may read it there (a tied output head).
            modules[name] = modules[holder]
        else:
            members[holder].append(name)
    return [UnitPlan(name, modules[name], tuple(names)) for name, names in members.items() if names]


def _paths_of(model: nn.Module) -> dict[str, list[list[nn.Module]]]:
    """Return by first name the modules from the model to the holder, for each way to get there."""
    named = dict(model.named_modules(remove_duplicate=False))
    first_names: dict[int, str] = {}
    paths: dict[str, list[list[nn.Module]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        levels = name.split(".")[:-1]
        path = [named[".".join(levels[:depth])] for depth in range(len(levels) + 1)]
        paths.setdefault(first_names.setdefault(id(parameter), name), []).append(path)
    return paths


def _innermost(paths: list[list[nn.Module]], chosen: dict[int, str]) -> str:
    shared = set.intersection(*({id(module) for module in path} for path in paths))
    return next(
        chosen[id(module)]
        for module in reversed(paths[0])
        if id(module) in shared and id(module) in chosen
    )
