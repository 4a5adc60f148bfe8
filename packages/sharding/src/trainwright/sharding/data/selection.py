"""Which parameters are meant: by name, by the parameter itself, or by what it is."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeGuard

import attrs
import torch
from torch import nn

from trainwright.collectives import ShardSpec
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.parameters import ModelParameter
from trainwright.sharding.errors import ShardingError

Rule: TypeAlias = Callable[[ShardSpec], bool]
"""Chooses by a parameter as the plain model has it: ``spec.name``, ``spec.global_shape``."""

Member: TypeAlias = nn.Parameter | str | tuple[str, nn.Parameter]
"""A parameter of the module, its name, or both as `nn.Module.named_parameters` gives them."""

Selection: TypeAlias = Rule | Member | Iterable[Member]
"""What stands for some parameters of a module."""


@attrs.frozen(eq=False)
class KnownParameters:
    """The parameters of a data-parallel module, the same on every rank that holds the module.

    Args:
        trained: By first name, in the order of registration, what this rank's module has of each
            trainable parameter, uncut by data parallelism.
        first_names: The first name for every name, of a tied parameter and of the others.
        names: The first name by the id of the module's parameter.
    """

    trained: dict[str, ShardSpec]
    first_names: dict[str, str]
    names: dict[int, str]

    @classmethod
    def of(cls, parallel: DataParallel) -> KnownParameters:
        """Return those of this rank's module, also where it keeps nothing of them."""
        module = parallel.module
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return cls(
            trained_specs(parallel),
            {
                name: names[id(parameter)]
                for name, parameter in module.named_parameters(remove_duplicate=False)
            },
            names,
        )

    def select(self, selection: Selection, where: str) -> list[str]:
        """Return the first names of the trainable parameters that are meant, each once.

        Args:
            selection: A rule, or members in any order; frozen and empty ones are left out.
            where: Begins messages, for instance "group 1".

        Raises:
            ShardingError: A member is not of the module, or members have no order.
        """
        if callable(selection) and not isinstance(selection, torch.Tensor):
            return [name for name, spec in self.trained.items() if selection(spec)]
        if isinstance(selection, (set, frozenset)):
            raise ShardingError(f"{where} is a set, whose order differs between runs; give a list")
        single = isinstance(selection, (str, torch.Tensor)) or _is_named(selection)
        members: Iterable[object] = (selection,) if single else selection
        found = [self._name_of(member, where) for member in members]
        return [name for name in dict.fromkeys(found) if name in self.trained]

    def _name_of(self, member: object, where: str) -> str:
        if _is_named(member):
            member = member[1]
        if isinstance(member, str):
            if member in self.first_names:
                return self.first_names[member]
            near = difflib.get_close_matches(member, self.first_names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ShardingError(f"{where} names {member!r}, which the module does not have{hint}")
        if not isinstance(member, torch.Tensor):
            raise ShardingError(
                f"{where} holds a {type(member).__name__}; give the module's parameters, their "
                "names, or a rule on their specs"
            )
        if id(member) in self.names:
            return self.names[id(member)]
        raise ShardingError(
            f"{where} holds a tensor of shape {tuple(member.shape)} that is no parameter of the "
            "module; give the module's own parameters or their names, not pieces or copies"
        )


def _is_named(member: object) -> TypeGuard[tuple[str, torch.Tensor]]:
    return (
        isinstance(member, tuple)
        and len(member) == 2
        and isinstance(member[0], str)
        and isinstance(member[1], torch.Tensor)
    )


def trained_parameters(parallel: DataParallel) -> dict[str, ModelParameter]:
    """Return the trainable parameters that have elements in the plain model, by name.

    The same names on every rank of a pipeline stage, also where a rank keeps nothing of them.
    """
    known = parallel._flat.parameters  # of what is kept elsewhere nothing else knows
    return {
        entry.name: entry
        for entry in known
        if entry.trained and 0 not in entry.placement.global_shape
    }


def trained_specs(parallel: DataParallel) -> dict[str, ShardSpec]:
    """Return this rank's elements of each trainable parameter, uncut by data parallelism, by name.

    The same names on every rank of a pipeline stage, in the order of registration: also where a
    rank has no elements. Parameters without elements in the plain model are left out.
    """
    return {name: entry.spec for name, entry in trained_parameters(parallel).items()}
