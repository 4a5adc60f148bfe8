"""Measures the operators of a module: what each reads, gives, saves and takes."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright.checkpointing.activations.operators import is_random, short_name
from trainwright.checkpointing.errors import PlanError

from .choices import Choice
from .costs import OperatorCost, OperatorCosts


def profile_operators(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    repeats: int = 5,
    choices: Sequence[Choice] = (),
) -> OperatorCosts:
    """Measure what the operators under one call of ``function`` cost.

    An operator is named as `short_name` names it, with the number of its run: ``mm.0``,
    ``mul.Tensor.3``. Views and changes in place are part of the operator that made the storage.

    Raises:
        PlanError: Two runs of the function ran different operators.
    """
    runs = [_run(function, args, kwargs) for _ in range(repeats + 1)]
    recorded = runs[0]
    names = [[node.name for node in run.nodes] for run in runs]
    if any(each != names[0] for each in names):
        raise PlanError(
            "the function ran other operators when it was called again, so no plan would hold; "
            "profile a part of it that always takes the same way"
        )
    timed = runs[1:]
    costs = []
    for number, node in enumerate(recorded.nodes):
        seconds = statistics.median(run.nodes[number].time_s for run in timed)
        costs.append(node.cost(seconds, recorded))
    return OperatorCosts(costs, choices)


@attrs.define(eq=False)
class _Node:
    """One operator that made storages of its own."""

    name: str
    recomputable: bool
    time_s: float = 0.0
    storages: dict[int, tuple[int, bool]] = attrs.field(factory=dict)
    inputs: list[_Node] = attrs.field(factory=list)

    def cost(self, seconds: float, recorder: _Recorder) -> OperatorCost:
        """Return what the planner is told."""
        inputs = dict.fromkeys(node.name for node in self.inputs) if self.recomputable else {}
        return OperatorCost(
            self.name,
            seconds,
            sum(size for size, _ in self.storages.values()),
            tuple(inputs),
            needed=any(key in recorder.saved for key in self.storages),
            recomputable=self.recomputable,
            compressible_bytes=sum(size for size, floats in self.storages.values() if floats),
        )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator run, with the storages that it reads and makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[_Node] = []
        self.saved: set[int] = set()
        self._owners: dict[int, _Node] = {}
        self._counts: Counter[OpOverload] = Counter()
        self._alive: list[torch.Tensor] = []  # so that no address is used twice

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that a backward will read ``tensor``."""
        self._alive.append(tensor.detach())
        self.saved.update(_keys([tensor]))
        return tensor

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and note what it did."""
        given = _tensors_in((args, kwargs or {}))
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        for device in {tensor.device for tensor in given if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        number = self._counts[func]
        self._counts[func] += 1
        made = _tensors_in(result)
        self._alive += made
        self._note(f"{short_name(func)}.{number}", func, given, made, seconds)
        return result

    def _note(
        self,
        name: str,
        func: OpOverload,
        given: list[torch.Tensor],
        made: list[torch.Tensor],
        seconds: float,
    ) -> None:
        read = [self._owners[key] for key in _keys(given) if key in self._owners]
        known = set(_keys(given))
        own = {
            tensor.untyped_storage()._cdata: (
                tensor.untyped_storage().nbytes(),
                tensor.dtype.is_floating_point,
            )
            for tensor in made
            if tensor.untyped_storage()._cdata not in known
        }
        if not own:
            self._change(func, given, read, seconds)
            return
        pure = not is_random(func) and not func._schema.is_mutable
        node = _Node(name, pure, seconds, own, read)
        self.nodes.append(node)
        self._owners.update(dict.fromkeys(own, node))

    def _change(
        self, func: OpOverload, given: list[torch.Tensor], read: list[_Node], seconds: float
    ) -> None:
        """Count a view, or a change in place, to the operator that made the storage."""
        owner = next((self._owners[key] for key in _keys(given[:1]) if key in self._owners), None)
        if owner is None:
            return
        owner.time_s += seconds
        if not func._schema.is_mutable:
            return
        position = self.nodes.index(owner)
        later = {id(node) for node in self.nodes[position + 1 :]}
        others = [node for node in read if node is not owner]
        was_read = any(owner in node.inputs for node in self.nodes[position + 1 :])
        if is_random(func) or was_read or any(id(node) in later for node in others):
            # Its result is not what the operator alone gives, at its place in the order.
            owner.recomputable = False
        owner.inputs += others


def _run(function: Callable[..., Any], args: Any, kwargs: Any) -> _Recorder:
    recorder = _Recorder()
    with saved_tensors_hooks(recorder.save, lambda tensor: tensor), recorder:
        function(*args, **kwargs)
    return recorder


def _tensors_in(value: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(value)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.layout == torch.strided]


def _keys(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.untyped_storage()._cdata for tensor in tensors]
