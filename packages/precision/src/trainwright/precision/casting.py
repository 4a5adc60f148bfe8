"""Putting a dtype policy onto the modules of a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainwright.precision.errors import PrecisionError
from trainwright.precision.policy import DtypePolicy


@attrs.frozen(eq=False)
class AppliedPolicy:
    """What `DtypePolicy.apply` did to a module.

    Parameters have the policy's dtypes, in place, so that optimizers and ties keep hold of them.
    Buffers are left alone: rotary angles and running statistics keep their digits. Each module that
    owns parameters casts its floating-point inputs to the dtype in which they enter products, so a
    kept norm computes in float32 between 16-bit products. Where weights are stored in another
    dtype than they are computed in, a cast copy that lives for one forward stands in for them: a
    weight changed in place is seen by the next forward. The outermost module casts its output.

    A weight that a module reads from its child, past the child's forward, is not cast.

    Args:
        policy: the policy that was applied.
        dtypes: parameter name to the dtype that it has now.
        originals: parameter name to the values before rounding, for those that lost digits; give
            them to `MasterWeights`, or drop this object and they are freed.
    """

    policy: DtypePolicy
    dtypes: Mapping[str, torch.dtype]
    originals: Mapping[str, torch.Tensor] = attrs.field(repr=False)
    _handles: tuple[RemovableHandle, ...] = attrs.field(repr=False)

    def remove(self) -> None:
        """Take the casts of inputs, weights and output off again; parameters stay as they are."""
        for handle in self._handles:
            handle.remove()


def apply_policy(policy: DtypePolicy, module: nn.Module) -> AppliedPolicy:
    """Cast the parameters of ``module`` and install its casts; `DtypePolicy.apply` calls this."""
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    policy.check_patterns(name for names in names_of.values() for name in names)
    ruling = {parameter: _ruling_name(policy, names) for parameter, names in names_of.items()}
    plan = _plan_products(policy, module, ruling)
    originals = {
        name: original
        for parameter, name in ruling.items()
        if (original := _cast_in_place(parameter, policy.parameter_dtype(name, parameter)))
        is not None
    }
    handles: list[RemovableHandle] = []
    for owner, dtype in plan.items():
        handles.append(owner.register_forward_pre_hook(_input_caster(dtype), with_kwargs=True))
        stored = {p.dtype for p in _floating(owner).values()}
        if stored != {dtype}:
            handles.extend(_swap_in_casts(owner, dtype))
    handles.append(module.register_forward_hook(_output_caster(policy.output)))
    dtypes = {name: p.dtype for p, names in names_of.items() for name in names}
    return AppliedPolicy(policy, dtypes, originals, tuple(handles))


def _ruling_name(policy: DtypePolicy, names: list[str]) -> str:
    # A tied weight is kept if any of its names is.
    return next((name for name in names if policy.keeps(name)), names[0])


def _floating(module: nn.Module) -> dict[str, nn.Parameter]:
    own = module.named_parameters(recurse=False)
    return {name: parameter for name, parameter in own if parameter.is_floating_point()}


def _plan_products(
    policy: DtypePolicy, module: nn.Module, ruling: Mapping[nn.Parameter, str]
) -> dict[nn.Module, torch.dtype]:
    plan: dict[nn.Module, torch.dtype] = {}
    for path, owner in module.named_modules():
        dtypes = {
            name: policy.compute_dtype(ruling[parameter], parameter)
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


def _input_caster(dtype: torch.dtype) -> Callable[..., tuple[Any, Any]]:
    def cast_inputs(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

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


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested tuples, lists and dicts; leave the rest."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, cast_floating(item, dtype)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_floating(item, dtype) for item in value)
    return value
