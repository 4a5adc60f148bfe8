"""Gives memory and first values to modules that were built on the meta device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from torch import nn

from trainwright.collectives import random
from trainwright.sharding.errors import NotAvailableError, ShardingError

Initializer = Callable[[str, nn.Module], None]
"""Writes every direct parameter and buffer of the module with this name, in place."""

# torch's global generators, which `reset_parameters` draws from, are shared by all threads.
_LOCK = threading.Lock()


def materialize(
    modules: Sequence[tuple[str, nn.Module]],
    device: torch.device | str,
    initialize: Initializer,
) -> None:
    """Allocate the direct meta parameters and buffers of modules and let them be initialised.

    Parameters stay the same objects, so that tied ones stay tied and other owners see the memory.
    Everything is allocated before anything is initialised, and a module comes after the modules
    inside of it, as in a constructor. Of the owners of a tied parameter the first decides its
    values: pass them all in one call. A tensor that had memory before keeps its values.

    Args:
        modules: Names in the model and modules, the outer ones first, as from ``named_modules()``;
            those without direct meta tensors are left alone.
        device: Where the memory is.
        initialize: Called once for each of the others, without gradients.

    Raises:
        ShardingError: Naming it: a parameter was not or not wholly written, was replaced by another
            or has hooks, a module holds a meta tensor that is no parameter and no buffer, or
            ``initialize`` wrote to tensors of a module that is not among ``modules``.
    """
    target = torch.device(device)
    chosen = [(name, module) for name, module in modules if _has_meta(module)]
    for name, module in chosen:
        _check_module(name, module)
    fresh = [_allocate(name, module, target) for name, module in chosen]
    own = {id(module) for _, module in modules}
    new = {id(entry.tensor) for item in fresh for entry in item.entries}
    with torch.no_grad():
        for item in reversed(fresh):
            others = _versions_of_others(item.module, own)
            kept = _values_of_old(item.module, new)
            initialize(item.name, item.module)
            for tensor, values in kept:
                tensor.copy_(values)
            _check_others(item, others)
    for item in fresh:
        for entry in item.entries:
            _check_written(item, entry)


def seeded_reset(seed: int) -> Initializer:
    """Return an initializer that runs each module's ``reset_parameters`` on numbers of its own.

    The values depend on the seed, the module's name and the kind of device: not on the rank, the
    sharding or the order of modules. torch's global generators are as they were afterwards;
    meanwhile other threads must not draw from them.

    Args:
        seed: 0 to 2**64 - 1.

    Returns:
        An `Initializer`; it raises ShardingError for a module without ``reset_parameters``, and
        NotAvailableError on devices whose generator torch does not show.
    """
    random.Key(seed, "")

    def initialize(name: str, module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None)
        reset = getattr(module, "_reset_parameters", None) if reset is None else reset
        if reset is None:
            held = ", ".join(key for key, _ in _direct(module))
            raise ShardingError(
                f"{_describe(name, module)} has no reset_parameters(), so nothing says how {held} "
                "begin; give the class one, or pass data_parallel an initialize of your own that "
                "writes them and hands other modules to seeded_reset"
            )
        low, high = random.Key(seed, name).words
        with _LOCK:
            generators = _generators_of(module)
            states = [generator.get_state() for generator in generators]
            try:
                for generator in generators:
                    generator.manual_seed(high << 32 | low)
                reset()
            finally:
                for generator, state in zip(generators, states, strict=True):
                    generator.set_state(state)

    return initialize


@attrs.frozen(eq=False)
class _Fresh:
    """A tensor that was just allocated, and how to see that nobody wrote to it."""

    key: str
    tensor: torch.Tensor
    version: int
    is_parameter: bool


@attrs.frozen(eq=False)
class _FreshModule:
    name: str
    module: nn.Module
    entries: tuple[_Fresh, ...]

    def named(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


def _direct(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for held in (module._parameters, module._buffers):
        for key, tensor in held.items():
            if tensor is not None:
                yield key, tensor


def _generators_of(module: nn.Module) -> list[torch.Generator]:
    """Return the CPU's generator and those of the devices on which the module is."""
    # Not torch.manual_seed(): it would reach devices that this module has nothing to do with.
    found = [torch.default_generator]
    devices = {tensor.device for _, tensor in _direct(module) if tensor.device.type != "cpu"}
    for device in devices:
        all_of_kind = getattr(torch.get_device_module(device.type), "default_generators", None)
        if all_of_kind is None or device.index is None:
            raise NotAvailableError(
                f"seeded_reset() cannot seed {device}; initialise on the CPU, or pass an "
                "initialize of your own"
            )
        found.append(all_of_kind[device.index])
    return found


def _has_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for _, tensor in _direct(module))


def _check_module(name: str, module: nn.Module) -> None:
    for key, value in vars(module).items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise ShardingError(
                f"{_describe(name, module)} holds the meta tensor {key}, which is neither a "
                "parameter nor a buffer, so nothing would give it values; use register_buffer("
                f"{key!r}, …, persistent=False)"
            )
    for key, tensor in _direct(module):
        if tensor.is_meta and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
            raise ShardingError(
                f"{key} of {_describe(name, module)} has hooks, which would be lost with its meta "
                "memory; register them after data_parallel()"
            )


def _allocate(name: str, module: nn.Module, device: torch.device) -> _FreshModule:
    found: list[_Fresh] = []
    if isinstance(module, nn.RNNBase):
        module._flat_weight_refs = []  # a tensor with weak references cannot be swapped
    for key, meta in _direct(module):
        if not meta.is_meta:
            continue
        memory = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
        if memory.is_floating_point() or memory.is_complex():
            memory.fill_(torch.nan)
        is_parameter = key in module._parameters
        if is_parameter:
            memory = nn.Parameter(memory, requires_grad=meta.requires_grad)
        vars(memory).update(vars(meta))
        # Not another object in its place: whoever else holds the tensor gets the memory too.
        torch.utils.swap_tensors(meta, memory)  # type: ignore[no-untyped-call]
        found.append(_Fresh(key, meta, meta._version, is_parameter))
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    return _FreshModule(name, module, tuple(found))


def _values_of_old(module: nn.Module, new: set[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    old = [tensor for _, tensor in _direct(module) if id(tensor) not in new]
    return [(tensor, tensor.detach().clone()) for tensor in old]


def _check_written(owner: _FreshModule, fresh: _Fresh) -> None:
    name = owner.named(fresh.key)
    held = dict(_direct(owner.module)).get(fresh.key)
    if held is not fresh.tensor and fresh.is_parameter:
        raise ShardingError(
            f"initialize replaced the parameter {name} by another object, which unties it; "
            "write it in place (copy_, normal_, …)"
        )
    if held is None or held.numel() == 0:
        return
    if held.is_meta:
        missing = held.numel()
    elif held.is_floating_point() or held.is_complex():
        # The version counter does not tell: writing through .data leaves it as it is.
        missing = int(held.isnan().sum())
    else:
        untouched = held is fresh.tensor and held._version == fresh.version
        missing = held.numel() if untouched else 0
    if missing:
        kind = "parameter" if fresh.is_parameter else "buffer"
        raise ShardingError(
            f"initialize left {missing} of {held.numel()} elements of the {kind} {name} without "
            f"a value; let it write {fresh.key} of {type(owner.module).__name__} in place"
        )


def _versions_of_others(module: nn.Module, own: set[int]) -> list[tuple[str, torch.Tensor, int]]:
    return [
        (f"{path}.{key}", tensor, tensor._version)
        for path, inner in module.named_modules()
        if id(inner) not in own
        for key, tensor in _direct(inner)
    ]


def _check_others(owner: _FreshModule, others: list[tuple[str, torch.Tensor, int]]) -> None:
    for key, tensor, version in others:
        if tensor._version != version:
            raise ShardingError(
                f"initialising {_describe(owner.name, owner.module)} also wrote "
                f"{owner.named(key)}, which belongs to another unit, so that its values would "
                "depend on the sharding; put both in one unit, or write only direct tensors"
            )


def _describe(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"
