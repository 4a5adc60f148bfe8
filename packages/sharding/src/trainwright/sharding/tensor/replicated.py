"""Parameters that every tensor-parallel rank holds whole but applies to its own part only."""

from __future__ import annotations

import functools

from torch import nn

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.placement.parameters import ParameterPlacement
from trainwright.sharding.placement.values import Partial
from trainwright.sharding.protocol import ParallelModule


def place_partial_(module: nn.Module, axis: str = "tp") -> nn.Module:
    """Say of a module's own parameters that each rank computes a term of their gradient.

    So it is for a norm that sees a rank's positions only (sequence parallelism), or a rank's heads
    only (a norm over the head dim, with or without sequence parallelism). Any module will do:
    `torch.nn.LayerNorm`, `torch.nn.RMSNorm`, classes of other libraries. What the module computes
    is unchanged, and so are its type and the names of its parameters.

    Args:
        module: Gets a method ``parameter_placements``; its submodules get none.
        axis: The axis of the ranks.

    Returns:
        The module.

    Raises:
        ShardingError: The module places its parameters itself, or has been told before.
    """
    if isinstance(module, ParallelModule):
        raise ShardingError(
            f"{type(module).__name__} places its parameters itself: it has parameter_placements(). "
            "Leave it out, or take back what place_partial_ did with unplace_partial_"
        )
    # A partial of a function of this file, so that copies and pickles speak for themselves.
    module.parameter_placements = functools.partial(  # type: ignore[assignment]
        _placements, module, axis
    )
    return module


def unplace_partial_(module: nn.Module) -> nn.Module:
    """Take back what `place_partial_` did.

    Raises:
        ShardingError: It has not been called on this module.
    """
    placed = vars(module).get("parameter_placements")
    if not isinstance(placed, functools.partial) or placed.func is not _placements:
        raise ShardingError(f"{type(module).__name__} was not placed by place_partial_")
    del module.parameter_placements
    return module


def _placements(module: nn.Module, axis: str) -> dict[str, ParameterPlacement]:
    return {
        name: ParameterPlacement.replicated(parameter.shape, {axis: Partial()})
        for name, parameter in module.named_parameters(recurse=False)
    }
