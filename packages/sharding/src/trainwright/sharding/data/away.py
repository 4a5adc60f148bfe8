"""A bucket whose states, or weights too, are kept away from the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import attrs
import torch
from torch import nn

from trainwright.collectives import Work
from trainwright.sharding.data.agreement import agree
from trainwright.sharding.data.layout import GroupLayout
from trainwright.sharding.data.policy import ShardPolicy
from trainwright.sharding.errors import NotAvailableError, ShardingError
from trainwright.sharding.mesh import Mesh
from trainwright.sharding.mesh.axes import STAGE_AXES
from trainwright.sharding.offload import (
    FileSlot,
    Offload,
    OffloadError,
    Slot,
)


class AwayWeights:
    """Where a bucket's masters are kept, and its part of the module's weights; a `StepUnit`.

    Args:
        offload: Keeps and moves them.
        kept: This rank's part of the weights, on the device or in a slot of its own.
        masters: Where the masters are kept; None of weights that are not trained.
        weights: The slot of ``kept``; None where that stays on the device.
        turns: Of gathers from there.

    ``sums`` is where summed gradients are kept, set where there are some.
    """

    def __init__(
        self,
        offload: Offload,
        kept: torch.Tensor,
        masters: Slot | None,
        weights: Slot | None,
        turns: Turns,
    ) -> None:
        self.turns = turns
        self._offload = offload
        self._kept = kept
        self._masters = masters
        self._weights = weights
        self.sums: Slot | None = None
        self._shown: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._pieces: list[tuple[nn.Parameter, int, torch.Size]] = []
        self._returned: tuple[int, Work] | None = None

    @property
    def is_trained(self) -> bool:
        """Whether there are masters."""
        return self._masters is not None

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The pieces that an optimizer updates."""
        return [parameter for parameter, _, _ in self._pieces]

    @property
    def masters(self) -> Slot:
        """Where their elements are kept."""
        assert self._masters is not None
        return self._masters

    @property
    def gradients(self) -> Slot:
        """Where their gradients are kept."""
        assert self.sums is not None
        return self.sums

    @property
    def work_bytes(self) -> int:
        """Room to round weights in before they are written to a file."""
        kept = self._kept
        return kept.numel() * kept.itemsize if isinstance(self._weights, FileSlot) else 0

    def hold(self, parameters: Iterable[nn.Parameter]) -> None:
        """Learn which pieces are parts of the masters."""
        self._pieces = [(each, int(each.storage_offset()), each.shape) for each in parameters]

    def show(self, masters: torch.Tensor) -> None:
        """Let the pieces be parts of a tensor, which has all elements of the masters."""
        for parameter, start, shape in self._pieces:
            parameter.data = masters[start : start + shape.numel()].view(shape)

    def show_gradients(self, gradients: torch.Tensor | None) -> None:
        """Let the pieces' gradients be parts of a copy, or again of what was copied."""
        for parameter, before in self._shown:
            parameter.grad = before
        self._shown = []
        if gradients is None:
            return
        for parameter, start, shape in self._pieces:
            kept = parameter.grad
            own = self.gradients.tensor[start : start + shape.numel()]
            if kept is not None and kept.data_ptr() == own.data_ptr():
                self._shown.append((parameter, kept))
                parameter.grad = gradients[start : start + shape.numel()].view(shape)

    def give_back(self, masters: torch.Tensor, work: torch.Tensor) -> Work:
        """Start making this rank's part of the weights of updated masters."""
        if isinstance(self._weights, FileSlot):
            rounded = work.view(self._kept.dtype)
            rounded.copy_(masters)
            moved = self._weights.write(rounded)
        else:
            moved = self._offload.to_device.copy(masters, self._kept, to_host=False)
        self._returned = (self._version(), moved)
        return moved

    def publish(self) -> None:
        """Make this rank's part of the weights of the masters, unless a step has begun that.

        What was changed in place since that step is seen; by way of ``.data`` it is not.
        """
        returned, self._returned = self._returned, None
        if returned is not None and returned[0] == self._version():
            returned[1].wait()
            return
        if self._weights is not None:
            self._kept.copy_(self.masters.tensor)
        else:
            self.give_back(self.masters.tensor, torch.empty(0)).wait()
            self._returned = None

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights are not on the device between uses."""
        return self._weights is not None

    def fetch(self, target: torch.Tensor) -> Work:
        """Start bringing this rank's part of the weights."""
        if isinstance(self._weights, FileSlot) and target.device.type == "cpu":
            return self._weights.read(target)
        return self._offload.to_device.copy(self._kept, target, to_host=False)

    def _version(self) -> int:
        return sum(parameter._version for parameter in self.parameters)


class Turns:
    """Gathers on one communicator whose inputs are still on their way: they begin in order.

    Each begins when the next one is asked for, or its result is: what it sends is fetched beside
    computing, and all ranks, which ask in one order, begin them in that order.
    """

    def __init__(self) -> None:
        self._waiting: deque[LaterGather] = deque()

    def ask(self, fetched: Work, begin: Callable[[], Work]) -> LaterGather:
        """Return a gather that begins once its input is fetched, after those before it."""
        self.begin_through(self._waiting[-1] if self._waiting else None)
        gather = LaterGather(self, fetched, begin)
        self._waiting.append(gather)
        return gather

    def begin_through(self, last: LaterGather | None) -> None:
        """Begin all gathers up to one of those that wait."""
        while last is not None and last in self._waiting:
            self._waiting.popleft().begin()


class LaterGather:
    """A gather that may not have begun.

    Args:
        turns: Those before it.
        fetched: What it sends is here.
        start: Starts it.
    """

    def __init__(self, turns: Turns, fetched: Work, start: Callable[[], Work]) -> None:
        self._turns = turns
        self._fetched = fetched
        self._start = start
        self._work: Work | None = None

    def begin(self) -> None:
        """Wait for the input, and start."""
        self._fetched.wait()
        self._work = self._start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Begin it and those before it, and wait for it."""
        self._turns.begin_through(self)
        assert self._work is not None
        self._work.wait(timeout_s)

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether it has begun and all has come."""
        return self._work is not None and self._work.is_done(within_s)


@attrs.frozen(eq=False)
class GradientTravel:
    """The way of a bucket's sums to where they are kept.

    Args:
        offload: Moves them.
        slot: Where they are kept.
    """

    offload: Offload
    slot: Slot

    def move(self, sums: torch.Tensor, kept: torch.Tensor, *, add: bool, freed_bytes: int) -> Work:
        """Start moving sums into, or onto, what the host keeps; device memory is free after."""
        after: Callable[[], None] = partial(self.offload.device.give, freed_bytes)
        return self.offload.to_host.copy(sums, kept, to_host=True, add=add, after=after)


def check_offload(policy: ShardPolicy, offload: Offload) -> None:
    """Raise where weights cannot be kept away from the device.

    Raises:
        ShardingError: Below stage 3 they are in use at any time.
        NotAvailableError: They travel as codes, which are made on the device.
    """
    if offload.weights is None:
        return
    if policy.stage < 3:
        raise ShardingError(
            f"weights are kept whole at stage {policy.stage}, so that they cannot be offloaded; "
            "choose stage 3, or offload states only"
        )
    if policy.weight_codec is not None:
        raise NotAvailableError(
            "offloaded weights cannot travel as codes; leave out weight_codec, or offload states "
            "only"
        )


def reserve(layout: Iterable[GroupLayout], stage: int, mesh: Mesh, offload: Offload | None) -> None:
    """Have space for masters and weights before any of them is moved, where they are offloaded.

    Raises:
        OffloadError: On every rank of the pipeline stage: one of them has no space.

    Communicates:
        One all-reduce of 8 bytes over the ranks of the stage: others may have more models.
    """
    if offload is None:
        return
    sizes: list[int] = []
    for group in layout:
        for bucket in group.buckets:
            numel = (bucket.stop - bucket.start) // (group.num_ranks if stage > 0 else 1)
            if group.key.trainable:  # masters, and gradients of their dtype
                sizes += [numel * group.key.master_dtype.itemsize] * 2
            if offload.weights is not None:
                sizes.append(numel * group.key.weight_dtype.itemsize)
    problem = None
    try:
        offload.states.reserve(sizes)
    except OffloadError as error:
        problem = str(error)
    agree(mesh.communicator(*STAGE_AXES), problem, OffloadError)
