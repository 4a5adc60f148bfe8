"""The states of one unit: where each lies in its slot, and in memory while it is updated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import torch
from torch import nn

from trainwright.sharding.offload.probing import stepping_only
from trainwright.sharding.offload.protocol import Slot, StepUnit, Store

_ALIGNMENT = 64


@attrs.frozen(eq=False)
class Part:
    """One state of one parameter.

    Args:
        parameter: What it is kept of.
        key: Its name among the states.
        dtype: Of its elements.
        start: Its first byte among the states of the unit.
    """

    parameter: nn.Parameter
    key: str
    dtype: torch.dtype
    start: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return its elements in memory of all states of the unit, in bytes."""
        stop = self.start + self.parameter.numel() * self.dtype.itemsize
        return memory[self.start : stop].view(self.dtype).view(self.parameter.shape)


class UnitStates:
    """What an optimizer keeps of the parameters of a unit.

    Args:
        unit: The parameters.
        optimizer: Updates them.
        dtypes: The states that it keeps of each parameter.
        group_of: The number of each parameter's group.
    """

    def __init__(
        self,
        unit: StepUnit,
        optimizer: torch.optim.Optimizer,
        dtypes: Mapping[nn.Parameter, Mapping[str, torch.dtype]],
        group_of: Mapping[nn.Parameter, int],
    ) -> None:
        self.unit = unit
        self.optimizer = optimizer
        self.parts: list[Part] = []
        groups: dict[int, list[nn.Parameter]] = {}
        at = 0
        for parameter in unit.parameters:
            if parameter not in dtypes:
                continue
            groups.setdefault(group_of[parameter], []).append(parameter)
            for key, dtype in dtypes[parameter].items():
                self.parts.append(Part(parameter, key, dtype, at))
                at += -(-parameter.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.groups = sorted(groups.items(), key=lambda item: item[0])
        self.num_bytes = at
        self.slot: Slot | None = None
        self._start: int | None = None

    @property
    def has_gradients(self) -> bool:
        """Whether some parameter has a gradient, so that a step changes something."""
        return any(p.grad is not None for _, parameters in self.groups for p in parameters)

    def step(self) -> None:
        """Let the optimizer update the parameters of the unit."""
        with stepping_only(self.optimizer, self.groups):
            self.optimizer.step()

    def allocate(self, store: Store) -> None:
        """Have a place for all of them, once."""
        if self.slot is None and self.num_bytes:
            self.slot = store.allocate(self.num_bytes, torch.uint8, torch.device("cpu"))
            self._start = self.slot.tensor.data_ptr()

    def present(self) -> Iterator[tuple[Part, torch.Tensor]]:
        """Yield the states that there are, as the optimizer has them now."""
        for part in self.parts:
            value = self.optimizer.state.get(part.parameter, {}).get(part.key)
            if isinstance(value, torch.Tensor) and value.shape == part.parameter.shape:
                yield part, value

    @property
    def are_kept(self) -> bool:
        """Whether some of them are in their slot and nowhere else."""
        return any(self._is_kept(part, value) for part, value in self.present())

    @property
    def are_complete(self) -> bool:
        """Whether there are all, so that a step makes none anew."""
        return sum(1 for _ in self.present()) == len(self.parts)

    def bring(self, memory: torch.Tensor) -> None:
        """Let the optimizer find its states in memory into which the slot was read.

        What it was given since (by loading its ``state_dict``) is taken from there.
        """
        for part, value in self.present():
            here = part.of(memory)
            if not self._is_kept(part, value):
                here.copy_(value)
            value.data = here

    def gather(self, memory: torch.Tensor) -> None:
        """Let memory have all states as the step has left them, also those that it made anew."""
        for part, value in self.present():
            here = part.of(memory)
            if value.data_ptr() != here.data_ptr():
                here.copy_(value)
                value.data = here

    def let_go(self) -> None:
        """Let the optimizer find its states in their slot, to which memory was written."""
        if self.slot is None:
            return
        for part, value in self.present():
            value.data = part.of(self.slot.tensor)

    def take_in(self, parameter: nn.Parameter | None = None) -> None:
        """Put what lies in other memory into the slot now, of one parameter or of all."""
        if self.slot is None:
            return
        for part, value in self.present():
            if parameter is not None and parameter is not part.parameter:
                continue
            if not self._is_kept(part, value):
                kept = part.of(self.slot.tensor)
                kept.copy_(value)
                value.data = kept

    def _is_kept(self, part: Part, value: torch.Tensor) -> bool:
        return self._start is not None and value.data_ptr() == self._start + part.start
