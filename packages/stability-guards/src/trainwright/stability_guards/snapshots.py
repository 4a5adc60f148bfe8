"""States to go back to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.stability_guards.errors import GuardError


@runtime_checkable
class Snapshot(Protocol):
    """States of a run by step: weights, moments, schedule, scaler, counters.

    All of it but the data position and the journal, which `Recovery` keeps. Law: after
    ``restore(step)`` everything is as it was at ``take(step)``, bit for bit, however often.
    """

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that can be restored, ascending."""
        ...

    def take(self, step: int) -> None:
        """Keep the state as it is before ``step`` is made; older ones may go."""
        ...

    def restore(self, step: int) -> None:
        """Put the state back and forget the ones of later steps."""
        ...


class Stateful(Protocol):
    """What a module, an optimizer, a scheduler and a scaler have in common."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Take a state over."""
        ...


class MemorySnapshots:
    """Snapshots in host memory, the newest few of them.

    While one is restored, one more copy exists: what is loaded may not be shared with what is kept.

    Args:
        parts: what makes up the state, by name.
        keep: how many snapshots are kept; the oldest goes before the next is taken.
        budget_bytes: what they may take together on a rank; None for no bound.
        communicator: ranks that take snapshots together; None where each is by itself.

    Raises:
        GuardError: ``keep`` is not positive.
    """

    def __init__(
        self,
        parts: Mapping[str, Stateful],
        *,
        keep: int = 2,
        budget_bytes: int | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        if keep < 1:
            raise GuardError(f"keep must be at least 1, got {keep}")
        self._parts = dict(parts)
        self._keep = keep
        self._budget_bytes = budget_bytes
        self._communicator = communicator
        self._kept: dict[int, dict[str, Any]] = {}

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that can be restored, ascending."""
        return tuple(sorted(self._kept))

    @property
    def bytes(self) -> int:
        """Host memory of the tensors that are kept now."""
        return sum(map(bytes_of, self._kept.values()))

    @property
    def needed_bytes(self) -> int:
        """Host memory that all snapshots take together if the state stays as large as it is."""
        return self._keep * bytes_of(self._states())

    def take(self, step: int) -> None:
        """Copy the state to the host.

        Raises:
            GuardError: with it the snapshots would take more than ``budget_bytes``; none is lost.
                On all ranks of the communicator where it is so on one of them.

        Communicates:
            With a budget, one MAX all-reduce of 8 bytes.
        """
        states = self._states()
        kept = [s for s in self.steps if s != step]
        old = kept[: max(len(kept) - self._keep + 1, 0)]
        if self._budget_bytes is not None:
            stays = sum(bytes_of(self._kept[s]) for s in kept if s not in old)
            self._check_budget(self._budget_bytes, stays + bytes_of(states))
        for gone in (*old, *(s for s in (step,) if s in self._kept)):
            del self._kept[gone]
        self._kept[step] = _copied(states, _to_host)

    def restore(self, step: int) -> None:
        """Load the state of ``step`` and forget the ones of later steps.

        Raises:
            GuardError: there is no snapshot of that step.
        """
        if step not in self._kept:
            raise GuardError(f"there is no snapshot of step {step}, only of {list(self.steps)}")
        for name, state in self._kept[step].items():
            self._parts[name].load_state_dict(_copied(state, torch.Tensor.clone))
        for later in [s for s in self._kept if s > step]:
            del self._kept[later]

    def _check_budget(self, budget: int, wanted: int) -> None:
        most = torch.tensor([wanted], dtype=torch.int64)
        if self._communicator is not None:
            most = most.to(self._communicator.device)
            self._communicator.all_reduce(most, ReduceOp.MAX).wait()
        if most.item() > budget:
            raise GuardError(
                f"snapshots would take {most.item()} bytes, more than budget_bytes={budget}; "
                f"raise it or lower keep={self._keep}"
            )

    def _states(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}


def bytes_of(tree: Any) -> int:
    """Return the bytes of all tensors in nested mappings, lists and tuples, each once."""
    seen: dict[Hashable, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        seen[_identity(tensor)] = tensor.numel() * tensor.element_size()
        return tensor

    _walked(tree, count)
    return sum(seen.values())


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copied(tree: Any, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    copies: dict[Hashable, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        # Tied tensors stay tied, and are kept once.
        identity = _identity(tensor)
        if identity not in copies:
            copies[identity] = copy_tensor(tensor)
        return copies[identity]

    return _walked(tree, once)


def _identity(tensor: torch.Tensor) -> Hashable:
    # A module's state has another object for each name of a tied parameter.
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    if not is_plain or not tensor.data_ptr():
        return id(tensor)
    place = (tensor.device, tensor.data_ptr(), tensor.dtype)
    return (*place, tuple(tensor.shape), tensor.stride())


def _walked(tree: Any, visit: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return visit(tree)
    if isinstance(tree, Mapping):
        return {key: _walked(value, visit) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_walked(value, visit) for value in tree)
    return copy.deepcopy(tree)
