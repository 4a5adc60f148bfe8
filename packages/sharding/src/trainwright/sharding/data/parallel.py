"""Data parallelism of a module."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from trainwright.sharding.data.build import flatten_model
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.parameters import collect_parameters
from trainwright.sharding.data.policy import ShardPolicy
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh import Mesh
from trainwright.sharding.placement import ParameterPlacement


def data_parallel(
    model: nn.Module,
    mesh: Mesh,
    policy: ShardPolicy | None = None,
    placements: Mapping[str, ParameterPlacement] | None = None,
) -> DataParallel:
    """Make a module's gradients sums over the data-parallel ranks.

    The module stays what it was, with the same names; its parameters become views of flat buffers.
    Call this before the first forward, and build the optimizer on ``pieces``.

    Args:
        model: This rank's module, on the device it trains on.
        mesh: The ranks.
        policy: The stage, bucket size and dtypes; None is stage 0.
        placements: Overrides what `placements_of` says of the parameters named.

    Raises:
        ShardingError: Before any communication: a parameter is lazy, has a gradient or a dtype
            that cannot be trained, shares memory with another, belongs to another `DataParallel`,
            or a placement does not fit.
        NotAvailableError: A parameter is on the meta device or is summed over pipeline stages.

    Communicates:
        With ``policy.broadcast_weights`` each weight once along each axis where it is replicated.
    """
    policy = ShardPolicy() if policy is None else policy
    parameters = collect_parameters(model, mesh, policy, placements)
    for entry in parameters:
        hooks = entry.parameter._post_accumulate_grad_hooks or {}
        if any(_is_ours(hook) for hook in hooks.values()):
            raise ShardingError(
                f"{entry.name} already belongs to a DataParallel; a parameter is reduced once"
            )
    return DataParallel(model, flatten_model(parameters, mesh, policy), mesh)


def _is_ours(hook: object) -> bool:
    return isinstance(hook, partial) and isinstance(
        getattr(hook.func, "__self__", None), DataParallel
    )
