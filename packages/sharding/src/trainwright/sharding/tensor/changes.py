"""What `parallelize` does to a module, as values that can be done and undone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainwright.collectives import Communicator
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.placement.parameters import ParameterPlacement
from trainwright.sharding.placement.values import Partial
from trainwright.sharding.protocol import ParallelModule
from trainwright.sharding.tensor.conv1d import from_stored, to_stored
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.parts import join_parts
from trainwright.sharding.tensor.replicated import place_partial_, unplace_partial_


class Shared:
    """Parameters made so far by the tied parameter they stand for, so that ties stay ties.

    Args:
        ties: For every parameter of a module that is about to be replaced, by (name of the module,
            name of the parameter): what tells apart the parameters of the model.
    """

    def __init__(self, ties: Mapping[tuple[str, str], int]) -> None:
        self._ties = ties
        self._made: dict[int, nn.Parameter] = {}

    def once(self, name: str, key: str, make: Callable[[], nn.Parameter]) -> nn.Parameter:
        """Return the one parameter for all names of a tied one, made at the first call."""
        tie = self._ties[name, key]
        if tie not in self._made:
            self._made[tie] = make()
        return self._made[tie]


class Change(Protocol):
    """One thing done to a module."""

    def apply(self, shared: Shared) -> None:
        """Do it; nothing is sent."""
        ...

    def check_undo(self) -> None:
        """Raise where it cannot be undone because the module was changed since."""
        ...

    def undo(self, shared: Shared) -> None:
        """Undo it; every rank joins, in the same order of changes."""
        ...


@attrs.frozen(eq=False)
class Replacement:
    """A layer in the place of a plain module.

    Args:
        name: First name of the module.
        parents: The modules that hold it, with the name by which each does.
        plain: The plain module; while it is replaced its parameters are on the meta device.
        layer: What replaces it.
        cuts: How each parameter is cut, and along which dim; absent ones are whole on every rank.
        tp: The tensor-parallel ranks.
    """

    name: str
    parents: tuple[tuple[nn.Module, str], ...]
    plain: nn.Module
    layer: nn.Module
    cuts: Mapping[str, tuple[Cut, int]]
    tp: Communicator
    _shapes: dict[str, torch.Size] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        own = self.layer.named_parameters(recurse=False)
        object.__setattr__(self, "_shapes", {key: part.shape for key, part in own})

    def placements(self) -> Mapping[str, ParameterPlacement]:
        """Return where the layer's parameters lie."""
        return self.layer.parameter_placements() if isinstance(self.layer, ParallelModule) else {}

    def apply(self, shared: Shared) -> None:
        """Give the layer its part of each parameter and put it in the module's place."""
        for key, whole in list(self.plain.named_parameters(recurse=False)):
            part = shared.once(self.name, key, functools.partial(self._part, key, whole))
            setattr(self.layer, key, part)
            # The whole parameter is let go here, module by module.
            meta = torch.empty_like(whole, device="meta")
            setattr(self.plain, key, nn.Parameter(meta, whole.requires_grad))
        self.layer.train(self.plain.training)
        for parent, key in self.parents:
            setattr(parent, key, self.layer)

    def initialize(self, initializer: Callable[[str, nn.Module], None]) -> None:
        """Let the plain module be initialised at full size, and keep the layer's part of it.

        Raises:
            ShardingError: A parameter was not written.
        """
        layer = dict(self.layer.named_parameters(recurse=False))
        held = {key: self.plain.get_parameter(key) for key in layer}
        try:
            for key, part in layer.items():
                whole = torch.empty_like(held[key], device=part.device, dtype=part.dtype)
                setattr(self.plain, key, nn.Parameter(whole, part.requires_grad))
            before = {key: self.plain.get_parameter(key)._version for key in layer}
            with torch.no_grad():
                initializer(self.name, self.plain)
                for key, part in layer.items():
                    whole = self.plain.get_parameter(key)
                    if whole._version == before[key]:
                        raise ShardingError(
                            f"{self.name}.{key} was not written by the initializer of a "
                            f"{type(self.plain).__name__}; write every parameter in place"
                        )
                    part.copy_(self._part(key, whole))
        finally:
            for key, meta in held.items():
                setattr(self.plain, key, meta)

    def check_undo(self) -> None:
        """Raise where the layer was replaced, or a parameter does not have its part's size."""
        for parent, key in self.parents:
            if getattr(parent, key, None) is not self.layer:
                raise ShardingError(
                    f"{self.name} was replaced since parallelize(), so it cannot be made whole; "
                    "put the layer back that parallelize() made"
                )
        for key, part in self.layer.named_parameters(recurse=False):
            if part.shape != self._shapes[key]:
                raise ShardingError(
                    f"{self.name}.{key} has shape {tuple(part.shape)}, its part is "
                    f"{tuple(self._shapes[key])}; put the parameter back that was there"
                )
            held = part.untyped_storage().nbytes()
            if not part.is_meta and held < part.numel() * part.element_size():
                raise ShardingError(
                    f"{self.name}.{key} is released by data parallelism: gather() all units before "
                    "unparallelize(), or take full_state_dict()"
                )

    def undo(self, shared: Shared) -> None:
        """Make the plain module's parameters whole again and put it back."""
        for key, part in list(self.layer.named_parameters(recurse=False)):
            whole = shared.once(self.name, key, functools.partial(self._whole, key, part))
            setattr(self.plain, key, whole)
        self.plain.train(self.layer.training)
        for parent, key in self.parents:
            setattr(parent, key, self.plain)

    def _part(self, key: str, whole: nn.Parameter) -> nn.Parameter:
        part = whole.detach()
        if key in self.cuts:
            cut, dim = self.cuts[key]
            part = to_stored(cut.take(part, dim, self.tp.rank), self._shapes[key])
        return nn.Parameter(part, whole.requires_grad)

    def _whole(self, key: str, part: nn.Parameter) -> nn.Parameter:
        whole = part.detach()
        if key in self.cuts:
            cut, dim = self.cuts[key]
            whole = from_stored(whole)
            if whole.is_meta:
                shape = (*whole.shape[:dim], cut.size, *whole.shape[dim + 1 :])
                return nn.Parameter(whole.new_empty(shape), part.requires_grad)
            with torch.no_grad():
                whole = join_parts(whole, self.tp, cut, dim).contiguous()
        if not whole.is_meta and whole.data_ptr() == part.data_ptr():
            # Not the memory of the part: data parallelism may own that, and release it.
            whole = whole.clone()
        return nn.Parameter(whole, part.requires_grad)


@attrs.frozen(eq=False)
class Hook:
    """A hook on a module, before or behind its forward.

    Args:
        module: The module.
        hook: Called as a forward (pre-)hook with keyword arguments.
        before: Whether it runs before the forward.
    """

    module: nn.Module
    hook: Callable[..., Any]
    before: bool
    _handles: list[RemovableHandle] = attrs.field(factory=list, init=False)

    def apply(self, shared: Shared) -> None:
        """Install it."""
        register = (
            self.module.register_forward_pre_hook
            if self.before
            else self.module.register_forward_hook
        )
        self._handles.append(register(self.hook, with_kwargs=True))

    def check_undo(self) -> None:
        """A hook can always be removed."""

    def undo(self, shared: Shared) -> None:
        """Remove it."""
        while self._handles:
            self._handles.pop().remove()


@attrs.frozen(eq=False)
class Placed:
    """A module's own parameters, whose gradients are terms of a sum over the ranks.

    Args:
        name: Of the module.
        module: The module.
    """

    name: str
    module: nn.Module

    def placements(self) -> Mapping[str, ParameterPlacement]:
        """Return where the parameters lie."""
        own = self.module.named_parameters(recurse=False)
        terms = {"tp": Partial()}
        return {key: ParameterPlacement.replicated(each.shape, terms) for key, each in own}

    def apply(self, shared: Shared) -> None:
        """Let the module say so."""
        place_partial_(self.module)

    def check_undo(self) -> None:
        """This can always be taken back."""

    def undo(self, shared: Shared) -> None:
        """Take it back."""
        unplace_partial_(self.module)


@attrs.frozen(eq=False)
class Attribute:
    """Another value of a module's attribute.

    Args:
        module: The module.
        name: Of the attribute.
        value: The new one.
    """

    module: nn.Module
    name: str
    value: object
    _old: object = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_old", getattr(self.module, self.name))

    def apply(self, shared: Shared) -> None:
        """Set the new value."""
        setattr(self.module, self.name, self.value)

    def check_undo(self) -> None:
        """An attribute can always be set."""

    def undo(self, shared: Shared) -> None:
        """Set the old value again."""
        setattr(self.module, self.name, self._old)
