"""Data parallelism of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from trainwright.collectives import Communicator
from trainwright.sharding.data.away import check_offload
from trainwright.sharding.data.build import FlatModel, flatten_model
from trainwright.sharding.data.driving import CallerDrives, UnitDriver
from trainwright.sharding.data.exports import guard_exports
from trainwright.sharding.data.hooks import HookDriver
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.materialize import Initializer
from trainwright.sharding.data.missing import check_no_gradient_is_missing
from trainwright.sharding.data.parameters import collect_parameters
from trainwright.sharding.data.policy import ShardPolicy
from trainwright.sharding.data.reducer import PATIENCE_S, Reducer
from trainwright.sharding.data.rounds import BackwardRounds, DrivenRounds
from trainwright.sharding.data.unit import Unit
from trainwright.sharding.data.units import runs
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh import Mesh
from trainwright.sharding.mesh.axes import STAGE_AXES
from trainwright.sharding.offload import Offload
from trainwright.sharding.placement import ParameterPlacement


def data_parallel(
    model: nn.Module,
    mesh: Mesh,
    policy: ShardPolicy | None = None,
    placements: Mapping[str, ParameterPlacement] | None = None,
    *,
    hooks: bool = True,
    initialize: Initializer | None = None,
    offload: Offload | None = None,
) -> DataParallel:
    """Make a module's gradients sums over the data-parallel ranks.

    The module stays what it was, with the same names; its parameters become views of flat buffers.
    Call this before the first forward, and build the optimizer on ``pieces``.

    Args:
        model: This rank's module, on the device it trains on.
        mesh: The ranks.
        policy: The stage, units, bucket size and dtypes; None is stage 0.
        placements: Overrides what `placements_of` says of the parameters named.
        hooks: Who gathers and releases weights at stage 3: hooks on the units' modules, or, with
            False, the caller, such as a pipeline's executor, through ``gather()``,
            ``await_weights()`` and ``release()``.
        initialize: Gives values to modules on the meta device: called with each module that
            directly holds meta parameters or buffers, and its name, after these were allocated.
            This goes unit by unit, and a unit is cut before the next one is allocated.
        offload: Keeps masters, summed gradients and maybe weights away from the device, each rank
            with its own. The optimizer is then stepped by `offloaded_step`; its results are the
            same bit for bit, but that at a ``reduce_dtype`` gradients are also rounded on their
            way to the host.

    Raises:
        ShardingError: Before any communication: a parameter is lazy, has a gradient or a dtype
            that cannot be trained, shares memory with another, belongs to another `DataParallel`,
            or a placement does not fit.
            A model on the meta device needs ``initialize``.
        OffloadError: On every rank of the pipeline stage: there is no space for states.

    Communicates:
        With ``policy.broadcast_weights`` each weight once along each axis where it is replicated.
        Stage 3: one split a distinct set of data axes, for the gathers. One split of the ranks of
        a pipeline stage for hooks at stage 3, and one more for ``missing_gradients="error"``, or
        ``reduce_each_backward`` under hooks. With ``offload`` one all-reduce of 8 bytes.
    """
    policy = ShardPolicy() if policy is None else policy
    if offload is not None:
        check_offload(policy, offload)
    parameters = collect_parameters(model, mesh, policy, placements)
    if initialize is None:
        _check_memory_exists(model)
    for entry in parameters:
        found = entry.parameter._post_accumulate_grad_hooks or {}
        if any(_is_ours(hook) for hook in found.values()):
            raise ShardingError(
                f"{entry.name} already belongs to a DataParallel; a parameter is reduced once"
            )
    driven = hooks and policy.stage == 3
    if driven:
        _check_units_run(model, policy)
    flat = flatten_model(model, parameters, mesh, policy, initialize, offload)
    guard_exports(flat.all_buckets)
    agree = _join_stage(mesh) if _needs_agreement(policy, hooks=hooks) else None
    reducer = _choose_reducer(flat, policy, agree, hooks=hooks)
    units = {
        plan.name: Unit(plan.name, plan.module, buckets, reducer) for plan, buckets in flat.units
    }
    return DataParallel(
        model,
        flat,
        mesh,
        units,
        reducer=reducer,
        driver=_drive(model, units, policy, mesh) if driven else CallerDrives(),
        check=_choose_check(flat, policy, agree, mesh),
    )


def _needs_agreement(policy: ShardPolicy, *, hooks: bool) -> bool:
    return policy.missing_gradients == "error" or (policy.reduce_each_backward and hooks)


def _join_stage(mesh: Mesh) -> Communicator:
    """Return a communicator of its own of the ranks of a pipeline stage, which step together."""
    stage = mesh.communicator(*STAGE_AXES)
    agree = stage.split(0, stage.rank)
    assert agree is not None
    return agree


def _choose_reducer(
    flat: FlatModel, policy: ShardPolicy, agree: Communicator | None, *, hooks: bool
) -> Reducer:
    # In a pipeline other stages would wait too, and the schedule says when memory is free.
    patience_s = PATIENCE_S if hooks and policy.stage >= 2 else 0.0
    if policy.reduce_each_backward:
        if agree is None:
            return DrivenRounds(flat.buckets)
        return BackwardRounds(flat.buckets, agree, patience_s)
    return Reducer(flat.buckets, early=policy.missing_gradients == "zero", patience_s=patience_s)


def _choose_check(
    flat: FlatModel, policy: ShardPolicy, agree: Communicator | None, mesh: Mesh
) -> Callable[[], None]:
    if agree is None or policy.missing_gradients == "zero":
        return lambda: None
    ranks = mesh.ranks(*STAGE_AXES)
    return partial(check_no_gradient_is_missing, flat.buckets, agree, ranks)


def _check_units_run(model: nn.Module, policy: ShardPolicy) -> None:
    for name, module in model.named_modules():
        if policy.units is not None and name and policy.units(name, module) and not runs(module):
            raise ShardingError(
                f"units chose {name}, a {type(module).__name__}, which never runs itself, so that "
                "no hook could gather its weights; choose modules inside or around it"
            )


def _drive(
    model: nn.Module, units: Mapping[str, Unit], policy: ShardPolicy, mesh: Mesh
) -> UnitDriver:
    """Let module hooks gather and release the units that are cut."""
    cut = [unit for unit in units.values() if unit.is_cut]
    if not cut:
        return CallerDrives()
    return HookDriver(
        cut, model, _join_stage(mesh), policy.live_units, policy.release_after_forward
    )


def _check_memory_exists(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ShardingError(
                f"{name} is on the meta device; pass initialize=…, which gives each module its "
                "values, or materialise the model first"
            )


def _is_ours(hook: object) -> bool:
    return isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), Reducer)
