"""The parameters of a model, each once, checked before anything is touched."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from itertools import pairwise

import attrs
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainwright.collectives import ShardSpec
from trainwright.sharding.data.layout import GroupKey
from trainwright.sharding.data.policy import WEIGHT_DTYPES, ShardPolicy
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh import Mesh
from trainwright.sharding.placement import ParameterPlacement, placements_of, shard_spec
from trainwright.sharding.protocol import WeightCodec

Owner = tuple[nn.Module, str]
"""A module and the attribute under which it holds a parameter."""


@attrs.frozen(eq=False)
class ModelParameter:
    """One parameter of a model, however many names it has.

    Args:
        name: Its first name.
        parameter: The module's parameter.
        owners: Every place that holds it.
        placement: Where it lies on the mesh.
        spec: This rank's elements of the global tensor, uncut by data parallelism.
        weight_dtype: Dtype that the module's weights are to have.
        master_dtype: Dtype that gradients and the optimizer's weights are to have.
        codec: How its weights travel; None: as they are.
    """

    name: str
    parameter: nn.Parameter
    owners: tuple[Owner, ...]
    placement: ParameterPlacement
    spec: ShardSpec
    weight_dtype: torch.dtype
    master_dtype: torch.dtype
    codec: WeightCodec | None = None

    @property
    def trained(self) -> bool:
        """Whether it gets gradients."""
        return self.parameter.requires_grad

    @property
    def key(self) -> GroupKey:
        """The group it belongs to."""
        return GroupKey(
            self.placement.reduction_axes,
            self.placement.replicated_axes,
            self.weight_dtype,
            self.master_dtype if self.trained else self.weight_dtype,
            self.trained,
            self.codec is not None,
        )


def collect_parameters(
    model: nn.Module,
    mesh: Mesh,
    policy: ShardPolicy,
    placements: Mapping[str, ParameterPlacement] | None,
) -> list[ModelParameter]:
    """Return the parameters of a model in the order of registration.

    Raises:
        ShardingError: A parameter cannot be trained this way, or a placement does not fit.
    """
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter)
    chosen = _choose_placements(model, placements or {})
    owners: dict[int, list[Owner]] = {}
    for module in model.modules():
        for attribute, held in module._parameters.items():
            if held is not None:
                owners.setdefault(id(held), []).append((module, attribute))
    found: list[ModelParameter] = []
    for name, parameter in model.named_parameters():
        placement = chosen[name]
        _check_placement(name, parameter, placement, mesh)
        weight_dtype = _choose_dtype(name, parameter, policy)
        found.append(
            ModelParameter(
                name,
                parameter,
                tuple(owners[id(parameter)]),
                placement,
                shard_spec(name, placement, mesh),
                weight_dtype,
                policy.master_dtype_of(parameter.dtype, weight_dtype)
                if parameter.requires_grad
                else weight_dtype,
                _choose_codec(name, parameter, policy),
            )
        )
    _check_devices(found)
    _check_memory(found)
    return found


def _choose_placements(
    model: nn.Module, given: Mapping[str, ParameterPlacement]
) -> dict[str, ParameterPlacement]:
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    named = dict(model.named_parameters(remove_duplicate=False))
    chosen = placements_of(model)
    spoken: dict[str, str] = {}
    for name, placement in given.items():
        if name not in named:
            near = difflib.get_close_matches(name, named, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ShardingError(f"placements name {name!r}, which the model does not have{hint}")
        first = first_names[id(named[name])]
        if first in spoken and chosen[first] != placement:
            raise ShardingError(
                f"{spoken[first]} and {name} are one parameter but are placed differently: "
                f"{chosen[first]} and {placement}"
            )
        spoken[first] = name
        chosen[first] = placement
    return chosen


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise ShardingError(f"{name} has no shape yet; run one forward of the plain model first")
    if parameter.grad is not None:
        raise ShardingError(
            f"{name} already has a gradient, which would be lost; call model.zero_grad() first"
        )
    if parameter.requires_grad and parameter.dtype not in WEIGHT_DTYPES:
        raise ShardingError(
            f"{name} is {parameter.dtype}; trainable parameters are one of "
            f"{', '.join(map(str, WEIGHT_DTYPES))}"
        )


def _check_placement(
    name: str, parameter: nn.Parameter, placement: ParameterPlacement, mesh: Mesh
) -> None:
    held = sum(box.numel for box in placement.boxes)
    if parameter.numel() != held:
        raise ShardingError(f"{name} has {parameter.numel()} elements but its boxes hold {held}")
    at, num_stages = mesh.coordinate("pp"), mesh.size("pp")
    if "pp" in placement.reduction_axes and at not in (0, num_stages - 1):
        raise ShardingError(
            f"{name} is tied over the ends of the pipeline (its gradient is Partial on pp), but "
            f"this rank is stage {at} of {num_stages}; only the first and the last may hold it"
        )


def _choose_dtype(name: str, parameter: nn.Parameter, policy: ShardPolicy) -> torch.dtype:
    if policy.parameter_dtype is None or not parameter.is_floating_point():
        return parameter.dtype
    dtype = policy.parameter_dtype(name, parameter)
    if dtype not in WEIGHT_DTYPES:
        raise ShardingError(
            f"parameter_dtype gave {dtype} for {name}; it must be one of "
            f"{', '.join(map(str, WEIGHT_DTYPES))}"
        )
    return dtype


def _choose_codec(name: str, parameter: nn.Parameter, policy: ShardPolicy) -> WeightCodec | None:
    codec = None if policy.weight_codec is None else policy.weight_codec(name, parameter)
    if codec is not None and not parameter.is_floating_point():
        raise ShardingError(
            f"weight_codec gave {codec} for {name}, which is {parameter.dtype}; codes are of "
            "floating-point weights, give None"
        )
    return codec


def _check_devices(found: list[ModelParameter]) -> None:
    placed = [entry for entry in found if not entry.parameter.is_meta]
    by_device = {entry.parameter.device: entry.name for entry in placed}
    if len(by_device) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in by_device.items())
        raise ShardingError(f"a model's parameters must be on one device, got {places}")


def _check_memory(found: list[ModelParameter]) -> None:
    """Raise where two parameters share memory: moving them into buffers would untie them."""
    spans: list[tuple[int, int, str]] = []
    for entry in found:
        tensor = entry.parameter
        if tensor.numel() == 0 or tensor.is_meta:
            continue
        steps = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        start = tensor.data_ptr()
        spans.append((start, start + (steps + 1) * tensor.itemsize, entry.name))
    for (_, stop, name), (start, _, other) in pairwise(sorted(spans)):
        if start < stop:
            raise ShardingError(
                f"{name} and {other} are two parameters in the same memory, which would be untied; "
                "tie weights by giving both modules the same nn.Parameter"
            )
