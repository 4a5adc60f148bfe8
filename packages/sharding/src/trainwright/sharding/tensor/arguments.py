"""Where a module's forward finds one of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from inspect import Parameter
from typing import Any, cast

import attrs
import torch
from torch import nn

from trainwright.sharding.errors import ShardingError


@attrs.frozen
class Argument:
    """Where a forward finds its input: by position, by name, or by either.

    Args:
        position: Among the positional arguments; None where it is passed by name only.
        name: Of the parameter; None where it is passed by position only.
    """

    position: int | None
    name: str | None

    @classmethod
    def of(
        cls, module: nn.Module, argument: int | str, where: str, *, others: bool = False
    ) -> Argument:
        """Return where a module's forward finds an argument.

        Args:
            module: The module.
            argument: Its position or its name.
            where: The module's name, for messages.
            others: Whether it may be one of the ``**kwargs`` of the forward.

        Raises:
            ShardingError: The forward has no such argument.
        """
        parameters = list(inspect.signature(module.forward).parameters.values())
        positional = [
            each.name
            for each in parameters
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        kinds = {each.kind for each in parameters}
        by_name = {each.name for each in parameters if each.kind == each.KEYWORD_ONLY}
        if isinstance(argument, int):
            if 0 <= argument < len(positional):
                return cls(argument, positional[argument])
            if argument >= 0 and Parameter.VAR_POSITIONAL in kinds:
                return cls(argument, None)
        elif argument in positional:
            return cls(positional.index(argument), argument)
        elif argument in by_name or (others and Parameter.VAR_KEYWORD in kinds):
            return cls(None, argument)
        raise ShardingError(
            f"{where or 'the module itself'} ({type(module).__name__}): its forward has no "
            f"argument {argument!r}; it has {', '.join(each.name for each in parameters) or 'none'}"
        )

    def get(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> torch.Tensor:
        """Return the argument of a call.

        Raises:
            ShardingError: It is not passed, or it is no tensor.
        """
        found = self.find(args, kwargs)
        if not isinstance(found, torch.Tensor):
            raise ShardingError(
                f"{where} was called without a tensor as argument {self.name or self.position!r}, "
                f"got {type(found).__name__}; the plan names the argument in Enter or SplitSequence"
            )
        return found

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """Return the argument of a call, None where it is not passed."""
        if self.name is not None and self.name in kwargs:
            return kwargs[self.name]
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return None

    def put(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: torch.Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with another value in the place of this one."""
        if self.name is not None and self.name in kwargs:
            return args, {**kwargs, self.name: value}
        position = cast(int, self.position)
        return (*args[:position], value, *args[position + 1 :]), dict(kwargs)
