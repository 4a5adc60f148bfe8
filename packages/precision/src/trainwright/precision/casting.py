"""Putting a dtype policy onto the modules of a plain loop."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainwright.precision.errors import PrecisionError
from trainwright.precision.float8 import Float8State, convert_linears
from trainwright.precision.policy import DtypePolicy

Convert = Callable[[torch.Tensor], torch.Tensor]


@attrs.frozen(eq=False)
class AppliedPolicy:
    """What `DtypePolicy.apply` did to a module.

    Parameters have the policy's dtypes, in place, so that optimizers and ties keep hold of them.
    Buffers are left alone: rotary angles and running statistics keep their digits, and so do they
    and what is kept when the whole module is cast afterwards, as by ``module.half()``; only the
    device follows. What is kept computes outside of any ``torch.autocast``. Each module that
    owns parameters casts its floating-point inputs to the dtype in which they enter products, so a
    kept norm computes in float32 between 16-bit products; so do kept modules without parameters,
    such as a softmax. Where weights are stored in another
    dtype than they are computed in, a cast copy that lives for one forward stands in for them: a
    weight changed in place is seen by the next forward. The outermost module casts its output.

    A weight that a module reads from its child, past the child's forward, is not cast. Linear
    layers get FP8 products, as `convert_linears` does it, where the policy has a recipe.

    Args:
        policy: the policy that was applied.
        dtypes: parameter name to the dtype that it has now.
        originals: parameter name to the values before rounding, for those that lost digits; give
            them to `MasterWeights`, or drop this object and they are freed.
        float8: what remembers the scales of FP8 products: call its ``end_step`` once a step. None
            where the policy has no recipe.
    """

    policy: DtypePolicy
    dtypes: Mapping[str, torch.dtype]
    originals: Mapping[str, torch.Tensor] = attrs.field(repr=False)
    float8: Float8State | None = attrs.field(repr=False)
    _handles: tuple[RemovableHandle, ...] = attrs.field(repr=False)
    _guarded: tuple[nn.Module, ...] = attrs.field(repr=False)

    def remove(self) -> None:
        """Take the casts of inputs, weights and output off again; what else was done stays."""
        for handle in self._handles:
            handle.remove()
        for module in self._guarded:
            module.__dict__.pop("_apply", None)


def apply_policy(policy: DtypePolicy, module: nn.Module) -> AppliedPolicy:
    """Cast the parameters of ``module`` and install its casts; `DtypePolicy.apply` calls this."""
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    policy.check_patterns(name for names in names_of.values() for name in names)
    kept_modules = {kept for kind in policy.keep_kinds for kept in kind(module)}
    kept = {p for p, names in names_of.items() if any(policy.keeps(name) for name in names)}
    # A tied weight is kept if any of its names or any of its owners is.
    kept.update(p for owner in kept_modules for p in owner.parameters(recurse=False))
    plan = _plan_products(policy, module, kept)
    float8 = _convert(policy, module, kept)
    if float8 is not None:
        plan = _plan_products(policy, module, kept)
    originals: dict[str, torch.Tensor] = {}
    for parameter, names in names_of.items():
        wanted = _wanted_dtype(policy, policy.parameter, parameter, kept)
        original = _cast_in_place(parameter, wanted)
        if original is not None:
            originals[names[0]] = original
    return AppliedPolicy(
        policy,
        dtypes={name: p.dtype for p, names in names_of.items() for name in names},
        originals=originals,
        float8=float8,
        handles=tuple(_install_casts(policy, module, plan, kept_modules, kept)),
        guarded=tuple(_guard_width(module, kept)),
    )


def _wanted_dtype(
    policy: DtypePolicy, requested: torch.dtype, parameter: nn.Parameter, kept: set[nn.Parameter]
) -> torch.dtype:
    if not parameter.is_floating_point():
        return parameter.dtype
    return policy.raised(parameter.dtype) if parameter in kept else requested


def _floating(module: nn.Module) -> dict[str, nn.Parameter]:
    own = module.named_parameters(recurse=False)
    return {name: parameter for name, parameter in own if parameter.is_floating_point()}


def _plan_products(
    policy: DtypePolicy, module: nn.Module, kept: set[nn.Parameter]
) -> dict[nn.Module, torch.dtype]:
    plan: dict[nn.Module, torch.dtype] = {}
    for path, owner in module.named_modules():
        dtypes = {
            name: _wanted_dtype(policy, policy.compute, parameter, kept)
            for name, parameter in _floating(owner).items()
        }
        if len(set(dtypes.values())) > 1:
            seen = ", ".join(f"{name} in {dtype}" for name, dtype in dtypes.items())
            raise PrecisionError(
                f"module {path or '(root)'!r} would compute with {seen}; "
                "keep_fp32 must match all parameters of a module or none"
            )
        if dtypes:
            plan[owner] = next(iter(dtypes.values()))
    return plan


def _convert(policy: DtypePolicy, module: nn.Module, kept: set[nn.Parameter]) -> Float8State | None:
    if policy.recipe is None:
        return None
    owners = module.named_modules()
    wide = [name for name, m in owners if type(m) is nn.Linear and m.weight in kept]
    return convert_linears(module, policy.recipe, keep=[re.compile(re.escape(n)) for n in wide])


def _install_casts(
    policy: DtypePolicy,
    module: nn.Module,
    plan: Mapping[nn.Module, torch.dtype],
    kept_modules: set[nn.Module],
    kept: set[nn.Parameter],
) -> Iterator[RemovableHandle]:
    for owner, dtype in plan.items():
        yield owner.register_forward_pre_hook(_input_caster(_always(dtype)), with_kwargs=True)
        if {p.dtype for p in _floating(owner).values()} != {dtype}:
            yield from _swap_in_casts(owner, dtype)
        if kept.intersection(_floating(owner).values()):
            yield from _leave_autocast(owner)
    for owner in module.modules():
        if owner in kept_modules and owner not in plan:
            yield owner.register_forward_pre_hook(_input_caster(policy.raised), with_kwargs=True)
    yield module.register_forward_hook(_output_caster(policy.output))


def _cast_in_place(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor | None:
    """Cast the parameter; return what it was if digits were lost."""
    if parameter.dtype == dtype:
        return None
    if parameter.grad is not None:
        raise PrecisionError(
            f"a parameter of shape {tuple(parameter.shape)} already has a gradient in "
            f"{parameter.grad.dtype}; apply the policy before the first backward pass"
        )
    before = parameter.detach()
    parameter.data = before.to(dtype)
    loses = torch.promote_types(before.dtype, dtype) != dtype
    return before if loses else None


def _input_caster(
    dtype_for: Callable[[torch.dtype], torch.dtype],
) -> Callable[..., tuple[Any, Any]]:
    def cast_inputs(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        return _cast_each(args, dtype_for), _cast_each(kwargs, dtype_for)

    return cast_inputs


def _output_caster(dtype: torch.dtype) -> Callable[..., Any]:
    def cast_output(module: nn.Module, args: Any, output: Any) -> Any:
        return cast_floating(output, dtype)

    return cast_output


def _swap_in_casts(owner: nn.Module, dtype: torch.dtype) -> tuple[RemovableHandle, ...]:
    # The copies are made in each forward, recomputed ones too, and live in the graph only: there
    # is no cache that could serve the weight of yesterday.
    stored: list[dict[str, nn.Parameter]] = []

    def swap_in(module: nn.Module, args: tuple[Any, ...]) -> None:
        stored.append(_floating(module))
        for name, parameter in stored[-1].items():
            module._parameters[name] = parameter.to(dtype)  # type: ignore[assignment]

    def swap_out(module: nn.Module, args: Any, output: Any) -> None:
        if stored:
            module._parameters.update(stored.pop())

    return (
        owner.register_forward_pre_hook(swap_in),
        owner.register_forward_hook(swap_out, always_call=True),
    )


def _leave_autocast(owner: nn.Module) -> tuple[RemovableHandle, ...]:
    # Autocast would cast a kept router's product down again, whatever its weights are.
    left: list[ExitStack] = []

    def leave(module: nn.Module, args: tuple[Any, ...]) -> None:
        stack = ExitStack()
        for device_type in {parameter.device.type for parameter in _floating(module).values()}:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        left.append(stack)

    def enter_again(module: nn.Module, args: Any, output: Any) -> None:
        if left:
            left.pop().close()

    return (
        owner.register_forward_pre_hook(leave),
        owner.register_forward_hook(enter_again, always_call=True),
    )


def _guard_width(module: nn.Module, kept: set[nn.Parameter]) -> Iterator[nn.Module]:
    """Let no later cast of the whole module narrow buffers and what is kept."""
    for owner in module.modules():
        keeps_all = bool(kept.intersection(_floating(owner).values()))
        if keeps_all or any(b.is_floating_point() for b in owner.buffers(recurse=False)):
            # A bound method and not a closure, so that a deep copy guards itself.
            guard = _apply_keeping_all if keeps_all else _apply_keeping_buffers
            owner.__dict__["_apply"] = types.MethodType(guard, owner)
            yield owner


def _apply_keeping_all(owner: nn.Module, fn: Convert, recurse: bool = True) -> nn.Module:
    gradients = [p.grad for p in owner.parameters(recurse=False) if p.grad is not None]
    wide = [*owner.parameters(recurse=False), *gradients, *owner.buffers(recurse=False)]
    return _apply_unless_narrower(owner, fn, recurse, wide)


def _apply_keeping_buffers(owner: nn.Module, fn: Convert, recurse: bool = True) -> nn.Module:
    return _apply_unless_narrower(owner, fn, recurse, list(owner.buffers(recurse=False)))


def _apply_unless_narrower(
    owner: nn.Module, fn: Convert, recurse: bool, wide: list[torch.Tensor]
) -> nn.Module:
    if recurse:
        for child in owner.children():
            child._apply(fn)  # type: ignore[no-untyped-call]
    held = {id(tensor) for tensor in wide}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        converted = fn(tensor)
        both = torch.promote_types(converted.dtype, tensor.dtype)
        if id(tensor) in held and tensor.is_floating_point() and both != converted.dtype:
            return tensor.to(converted.device)
        return converted

    # Through the class: under this instance's own name stands the guard that is running.
    type(owner)._apply(owner, convert, recurse=False)  # type: ignore[no-untyped-call]
    return owner


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested tuples, lists and dicts; leave the rest."""
    return _cast_each(value, _always(dtype))


def _always(dtype: torch.dtype) -> Callable[[torch.dtype], torch.dtype]:
    return lambda _: dtype


def _cast_each(value: Any, dtype_for: Callable[[torch.dtype], torch.dtype]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype_for(value.dtype)) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, _cast_each(item, dtype_for)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast_each(item, dtype_for) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_cast_each(item, dtype_for) for item in value)
    return value
