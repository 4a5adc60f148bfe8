"""An optimizer that updates states where they are kept, unit by unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from trainwright.collectives import Communicator, Work
from trainwright.sharding.data.agreement import agree
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.offload.errors import OffloadError
from trainwright.sharding.offload.file import FileStore
from trainwright.sharding.offload.probing import state_dtypes
from trainwright.sharding.offload.protocol import StepUnit, Store
from trainwright.sharding.offload.states import UnitStates
from trainwright.sharding.offload.streaming import StatesStream


class OffloadedStep:
    """Steps an optimizer of offloaded parameters, with the results of its own ``step``.

    A unit's weights go back to the device while the next unit is updated. From a file the next
    unit's states are read while one is updated and those of the one before are written: at most
    three units are in host memory, which is kept from update to update. Space for states is
    allocated here, before any update. Hooks of the optimizer run once a unit.

    Args:
        optimizer: Any element-wise one of ``torch.optim`` or of its kind, over parameters of the
            units.
        units: What is updated together, in this order.
        store: Keeps what the optimizer keeps.
        ranks: All ranks that step together.

    Raises:
        ShardingError: The optimizer has other parameters.
        NotAvailableError: It is not element-wise, or changes its options as it steps.
        OffloadError: One of the ranks has no space for the states, or one of the errors above; each
            of them says which.

    Communicates:
        One all-reduce of 8 bytes over all ranks; where there is a problem also its text.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Iterable[StepUnit],
        store: Store,
        ranks: Communicator,
    ) -> None:
        self._optimizer = optimizer
        self._store = store
        self._num_parameters = 0
        self._held: list[UnitStates] = []
        self._stream: StatesStream | None = None
        problem = None
        try:
            self._held = self._plan(list(units))
            if isinstance(store, FileStore):
                self._stream = StatesStream(self._held, store.ledger)
            self._allocate()
        except ShardingError as error:
            problem = error
        _agree(ranks, problem)
        self._unit_of = {p: states for states in self._held for p in states.unit.parameters}

    @property
    def unit_bytes(self) -> int:
        """Host memory that the largest unit takes while it is updated from a file."""
        return 0 if self._stream is None else self._stream.unit_bytes

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient, once.

        Raises:
            OffloadError: A file cannot be read or written.
            ShardingError: Parameters were added to the optimizer.
        """
        if sum(len(group["params"]) for group in self._optimizer.param_groups) != (
            self._num_parameters
        ):
            raise ShardingError(
                "parameters were added to the optimizer or taken from it since its states were "
                "offloaded; make a new OffloadedStep"
            )
        if self._stream is not None:
            self._stream.run()
        else:
            self._walk()

    @torch.no_grad()
    def take_in(self, parameter: nn.Parameter | None = None) -> None:
        """Put states that were loaded or made outside of `step` where they are kept.

        Args:
            parameter: Whose, if they are of this optimizer; None for all that there are.
        """
        if parameter is None:
            for states in self._held:
                states.take_in()
        elif parameter in self._unit_of:
            self._unit_of[parameter].take_in(parameter)

    def _walk(self) -> None:
        returns: list[Work] = []
        nothing = torch.empty(0, dtype=torch.uint8)
        for states in self._held:
            if not states.has_gradients:
                continue
            states.step()
            states.take_in()
            returns.append(states.unit.give_back(states.unit.masters.tensor, nothing))
        for work in returns:
            work.wait()

    def _plan(self, units: list[StepUnit]) -> list[UnitStates]:
        """Learn what the optimizer will keep, and find its parameters in the units."""
        groups = self._optimizer.param_groups
        number_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
        self._num_parameters = len(number_of)
        kinds: dict[tuple[int, int, torch.dtype], Mapping[str, torch.dtype]] = {}
        dtypes: dict[nn.Parameter, Mapping[str, torch.dtype]] = {}
        for unit in units:
            for parameter in unit.parameters:
                if parameter not in number_of:
                    continue
                number = number_of[parameter]
                kind = (number, parameter.dim(), parameter.dtype)
                if kind not in kinds:
                    kinds[kind] = state_dtypes(self._optimizer, groups[number], parameter)
                dtypes[parameter] = kinds[kind]
        others = [tuple(parameter.shape) for parameter in number_of if parameter not in dtypes]
        if others:
            raise ShardingError(
                f"the optimizer has {len(others)} parameters that are not offloaded, of shapes "
                f"{others[:3]}; build it on the pieces of what is"
            )
        held = [UnitStates(unit, self._optimizer, dtypes, number_of) for unit in units]
        return [states for states in held if states.groups]

    def _allocate(self) -> None:
        self._store.reserve(states.num_bytes for states in self._held if states.num_bytes)
        for states in self._held:
            states.allocate(self._store)


def _agree(ranks: Communicator, problem: ShardingError | None) -> None:
    try:
        agree(ranks, None if problem is None else str(problem), OffloadError)
    except OffloadError as error:
        if problem is None:
            raise
        raise type(problem)(str(error)) from problem
