"""What happens to activations where a module's work begins or ends to be shared by the ranks."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn

from trainwright.collectives import Communicator, differentiable
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.arguments import Argument
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.dropout import PlacedDropout, ShardedDim
from trainwright.sharding.tensor.key_value import KeyValueLinear
from trainwright.sharding.tensor.linear import ColumnParallelLinear
from trainwright.sharding.tensor.sequence import (
    SequenceSharding,
    enter_sequence,
    gather_sequence,
    split_sequence,
)


class Residual:
    """The activations between the shared parts of a model: whole, or this rank's positions.

    It remembers the length of the sequence that is under way where it is no multiple of the ranks,
    because a rank's part does not tell.

    Args:
        tp: The tensor-parallel ranks.
        sequence: How sequences are cut; None where they are not. Its length counts until a sequence
            is cut here: on a pipeline stage that gets positions.
    """

    def __init__(self, tp: Communicator, sequence: SequenceSharding | None) -> None:
        self.tp = tp
        self.sequence = sequence

    @property
    def is_cut(self) -> bool:
        """Whether a rank has its positions only."""
        return self.sequence is not None

    def split(self, whole: torch.Tensor) -> torch.Tensor:
        """Keep this rank's positions of a replicated tensor."""
        if self.sequence is None:
            return whole
        self.hear(whole.shape[self.sequence.dim])
        return split_sequence(whole, self.tp, self.sequence)

    def hear(self, length: int) -> None:
        """Take the length of the sequence that is under way from now on."""
        if self.sequence is not None:
            uneven = length % self.tp.size != 0
            self.sequence = attrs.evolve(self.sequence, length=length if uneven else None)

    def enter(self, here: torch.Tensor) -> torch.Tensor:
        """Pass on to work of which each rank does another part."""
        if self.sequence is None:
            return differentiable.replicate_to_partial(here, self.tp)
        return enter_sequence(here, self.tp, self.sequence)

    def join(self, here: torch.Tensor) -> torch.Tensor:
        """Pass on to work that every rank does alike."""
        return here if self.sequence is None else gather_sequence(here, self.tp, self.sequence)

    def shards(self) -> tuple[ShardedDim, ...]:
        """Return which dims of the activations are cut."""
        if self.sequence is None:
            return ()
        length, ranks = self.sequence.length, self.tp.size
        cut = None if length is None else Cut.uneven(length, ranks)
        return (ShardedDim(self.sequence.dim, self.tp.rank, ranks, cut),)


@attrs.frozen(eq=False)
class EnterRegion:
    """A forward pre-hook: the input goes to work of which each rank does another part.

    Args:
        residual: Of the model.
        argument: The input.
        where: Name of the module.
    """

    residual: Residual
    argument: Argument
    where: str

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the input passed on."""
        input = self.argument.get(args, kwargs, self.where)
        return self.argument.put(args, kwargs, self.residual.enter(input))


@attrs.frozen(eq=False)
class SplitRegion:
    """A forward pre-hook: from here on each rank has its positions of the input.

    Args:
        residual: Of the model.
        argument: The input.
        where: Name of the module.
    """

    residual: Residual
    argument: Argument
    where: str

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the input cut."""
        input = self.argument.get(args, kwargs, self.where)
        return self.argument.put(args, kwargs, self.residual.split(input))


@attrs.frozen(eq=False)
class HearLength:
    """A forward pre-hook: an argument tells the length of the whole sequence.

    Args:
        residual: Of the model.
        argument: The argument.
        dim: Its dim that is the whole sequence.
    """

    residual: Residual
    argument: Argument
    dim: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell it."""
        found = self.argument.find(args, kwargs)
        if isinstance(found, tuple) and found:
            found = found[0]
        if isinstance(found, torch.Tensor):
            self.residual.hear(found.shape[self.dim])


@attrs.frozen(eq=False)
class JoinRegion:
    """A forward hook: the output is whole again.

    Args:
        residual: Of the model.
        partial_gradient: Whether each rank goes on with other work.
    """

    residual: Residual
    partial_gradient: bool

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> torch.Tensor:
        """Return the whole output."""
        if not isinstance(output, torch.Tensor):
            raise ShardingError(
                f"JoinSequence() of a {type(module).__name__}, which returns a "
                f"{type(output).__name__}; it goes with a module that returns a tensor"
            )
        if self.partial_gradient:
            return self.residual.enter(output)
        return self.residual.join(output)


@attrs.frozen(eq=False)
class FollowSequence:
    """A forward pre-hook: a layer is told how the sequence under way is cut.

    Args:
        residual: Of the model.
    """

    residual: Residual

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell it."""
        if isinstance(module, PlacedDropout):
            module.shards = self.residual.shards()
        elif isinstance(module, (ColumnParallelLinear, KeyValueLinear)):
            module.sequence = self.residual.sequence


@attrs.frozen(eq=False)
class NoDropoutHere:
    """A forward pre-hook that refuses to drop values where the ranks would not agree.

    Args:
        where: Name of the module.
        attribute: The module's attribute that is the probability, or a dropout module; None where
            the module is one itself.
    """

    where: str
    attribute: str | None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise in training mode where the probability is not zero."""
        if module.training:
            self.check(module)

    def check(self, module: nn.Module) -> None:
        """Raise where the probability is not zero.

        Raises:
            ShardingError: It is not.
        """
        found = module if self.attribute is None else getattr(module, self.attribute)
        p = getattr(found, "p", found)
        if not p:
            return
        name = self.where if self.attribute is None else f"{self.where}.{self.attribute}"
        raise ShardingError(
            f"{name} drops values with p={p} in training, of which each rank would choose others; "
            + (
                "give it the style Dropout(seed=...), or set p = 0, or call eval()"
                if self.attribute is None
                else "set it to 0 (attention dropout is not placed), or call eval()"
            )
        )
