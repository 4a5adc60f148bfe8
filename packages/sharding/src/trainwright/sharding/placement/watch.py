"""A debug switch: what is declared replicated is compared over the ranks while a model runs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh.mesh import Mesh
from trainwright.sharding.placement.notes import Notes
from trainwright.sharding.placement.parameters import ParameterPlacement, placements_of
from trainwright.sharding.placement.partial import axes_of
from trainwright.sharding.placement.values import Replicate

Declared = Mapping[str, Iterable[str]]
"""Axes by the pattern of a module's name."""

_OF_VALUE = "what computes it misses a reduction, or draws other numbers on other ranks"
_OF_GRADIENT = (
    "work of which each rank does a part was entered without summing the gradients; where that is "
    "done later, name the module in partial_gradients"
)
_OF_PARAMETER = "its gradient is missing a reduction, or it was changed outside of training"
_OF_PARAMETER_GRADIENT = (
    "each rank has other terms of it; place the parameter with gradient={axis: Partial()}, so that "
    "they are summed"
)


class ReplicaWatch:
    """Compares activations, gradients and parameters that are declared replicated, as they arise.

    A context manager: inside the block hooks note a checksum of each such tensor, which neither
    waits for a device nor sends anything; at the end of the block, or in `check`, the ranks compare
    their notes. Outside the block nothing is left of it. For debugging: each tensor is read once.

    Args:
        model: This rank's module. Ranks along the axes named here run the same modules in the same
            order; one that does not is told.
        mesh: The mesh.
        axes: The axes on which parameters are compared, and their raw gradients where these are
            not `Partial`.
        outputs: By pattern of a module's name (``*`` stands for part of one dotted level), the axes
            on which what it and its forward hooks return is replicated, as after a reduction. The
            gradient of that is then replicated too, but for ``partial_gradients``.
        inputs: Likewise for what a module is given.
        partial_gradients: Patterns of modules whose output goes on into work of which each rank
            does another part, so that its gradient there is `Partial`.
        placements: Of the parameters, by name; None means `placements_of` the model.

    Raises:
        ShardingError: A pattern matches no module, or an axis is unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        axes: Iterable[str] = ("tp",),
        outputs: Declared | None = None,
        inputs: Declared | None = None,
        partial_gradients: Iterable[str] = (),
        placements: Mapping[str, ParameterPlacement] | None = None,
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._outputs = _declared(model, mesh, outputs or {})
        self._inputs = _declared(model, mesh, inputs or {})
        self._partial = set(_declared(model, mesh, dict.fromkeys(partial_gradients, ())))
        self._notes = Notes(mesh)
        self._handles: list[RemovableHandle] = []
        wanted = {axis for axis in axes if mesh.size(axis) > 1}
        known = placements_of(model) if placements is None else placements
        self._parameters = {
            id(parameter): _Watched.of(name, parameter, known[name], wanted)
            for name, parameter in model.named_parameters()
        }

    def __enter__(self) -> ReplicaWatch:
        self._notes = Notes(self._mesh)
        for parameter in self._parameters.values():
            parameter.is_noted = False
            self._hook_gradient(parameter)
        for name, module in self._model.named_modules():
            self._hook_module(name, module)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        try:
            if error is None:
                self.check()
        finally:
            self._notes.close()

    def check(self) -> None:
        """Compare what has been noted so far, and forget it.

        Raises:
            ReplicaMismatchError: On the ranks along the axes alike, naming the first tensor that
                differs and the ranks that hold one value against those that hold another; or the
                place where ranks began to run different modules.

        Communicates:
            For each distinct set of axes two all-reduces, of 32 bytes and of 16 bytes a tensor;
            where ranks differ, one all-gather of 8 bytes a rank.
        """
        for parameter in self._parameters.values():
            self._note_parameter(parameter)
            parameter.is_noted = False
        self._notes.compare(self._sets_of_axes())

    def _sets_of_axes(self) -> list[tuple[str, ...]]:
        # From what is declared, not from what was noted: every rank must compare the same sets.
        sets = {*self._outputs.values(), *self._inputs.values()}
        for parameter in self._parameters.values():
            sets |= {parameter.axes, parameter.gradient_axes}
        return sorted(sets)

    def _hook_gradient(self, watched: _Watched) -> None:
        if watched.gradient_axes and watched.parameter.requires_grad:
            label = f"the gradient of {watched.name}"
            note = self._noting(label, watched.gradient_axes, _OF_PARAMETER_GRADIENT)
            self._handles.append(_hook(watched.parameter, note))

    def _hook_module(self, name: str, module: nn.Module) -> None:
        own = [self._parameters[id(p)] for p in module.parameters(recurse=False)]
        called = name or "the model"

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for parameter in own:
                self._note_parameter(parameter)
            if name in self._inputs:
                for path, tensor in _tensors(args if not kwargs else (*args, kwargs)):
                    self._note(f"input{path} of {called}", tensor, self._inputs[name])

        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            for path, tensor in _tensors(result):
                label = f"output{path} of {called}"
                axes = self._outputs[name]
                self._note(label, tensor, axes)
                if tensor.requires_grad and name not in self._partial:
                    _hook(tensor, self._noting(f"the gradient of {label}", axes, _OF_GRADIENT))

        if own or name in self._inputs:
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if name in self._outputs:
            self._handles.append(module.register_forward_hook(after))

    def _noting(
        self, label: str, axes: tuple[str, ...], advice: str
    ) -> Callable[[torch.Tensor], None]:
        notes = self._notes

        def note(gradient: torch.Tensor) -> None:
            notes.add(label, gradient, axes, advice)

        return note

    def _note_parameter(self, watched: _Watched) -> None:
        if not watched.is_noted and watched.axes and _is_here(watched.parameter):
            watched.is_noted = True
            self._notes.add(watched.name, watched.parameter, watched.axes, _OF_PARAMETER)

    def _note(self, label: str, tensor: torch.Tensor, axes: tuple[str, ...]) -> None:
        partial = [axis for axis in axes_of(tensor) if axis in axes]
        if partial:
            raise ShardingError(
                f"{label} is declared replicated on {', '.join(partial)} but is partial there; "
                "reduce it, with redistribute(), or leave it out of the declaration"
            )
        self._notes.add(label, tensor, axes, _OF_VALUE)


@attrs.define(eq=False)
class _Watched:
    """A parameter, where it is replicated, and where its raw gradient is."""

    name: str
    parameter: nn.Parameter
    axes: tuple[str, ...]
    gradient_axes: tuple[str, ...]
    is_noted: bool = False

    @classmethod
    def of(
        cls, name: str, parameter: nn.Parameter, place: ParameterPlacement, axes: Iterable[str]
    ) -> _Watched:
        held = tuple(axis for axis in place.replicated_axes if axis in axes)
        computed = tuple(axis for axis in held if place.gradient_on(axis) == Replicate())
        return cls(name, parameter, held, computed)


def _declared(
    model: nn.Module, mesh: Mesh, patterns: Mapping[str, Iterable[str]]
) -> dict[str, tuple[str, ...]]:
    """Return the axes by the name of each module that a pattern means."""
    names = [name for name, _ in model.named_modules()]
    found: dict[str, tuple[str, ...]] = {}
    for pattern, axes in patterns.items():
        if isinstance(axes, str):
            raise ShardingError(
                f"{pattern!r} is declared replicated on {axes!r}; give its axes as a list, such as "
                f"[{axes!r}]"
            )
        parts = pattern.split(".")
        meant = [
            name
            for name in names
            if len(name.split(".")) == len(parts) and all(map(fnmatchcase, name.split("."), parts))
        ]
        if not meant:
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ShardingError(f"pattern {pattern!r} matches no module{hint}")
        for name in meant:
            found[name] = mesh.shape.ordered((*found.get(name, ()), *axes))
    return found


def _hook(tensor: torch.Tensor, note: Callable[[torch.Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = tensor.register_hook(note)  # type: ignore[no-untyped-call]
    return handle


def _tensors(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _tensors(inner, f"{path}[{index}]")


def _is_here(parameter: nn.Parameter) -> bool:
    # Weights that are gathered for use only have no memory in between.
    if parameter.is_meta:
        return False
    return parameter.numel() == 0 or parameter.untyped_storage().size() > 0
