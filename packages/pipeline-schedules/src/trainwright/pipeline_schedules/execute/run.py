"""One pass of one rank through its program: what is in flight, and what instructions do to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch.autograd.graph import get_gradient_edge

from trainwright.pipeline_schedules.execute.boundary import Crossing
from trainwright.pipeline_schedules.execute.errors import PipelineError
from trainwright.pipeline_schedules.execute.program import Instruction, Operation
from trainwright.pipeline_schedules.execute.protocol import Inputs, Loss, Reducer, WeightKeeper
from trainwright.pipeline_schedules.execute.stage_runner import (
    Flight,
    KeywordSplit,
    enter,
    leave,
    run_backward,
)
from trainwright.pipeline_schedules.execute.transfers import Links, Slot, Transfers

_Handed = tuple[Crossing, list[torch.Tensor]]


@attrs.frozen(eq=False)
class Parts:
    """What every run of an executor shares.

    ``split`` is None on ranks without the last stage.
    """

    stages: Mapping[int, torch.nn.Module]
    links: Links
    loss: Loss
    split: KeywordSplit | None
    reducers: Mapping[int, Reducer]
    weights: Mapping[int, WeightKeeper]

    @property
    def last_stage(self) -> int:
        """The stage whose output the loss is given."""
        return len(self.links.rank_of_stage) - 1


@attrs.frozen(eq=False)
class Seed:
    """What backward starts from, ``loss_scale / divisor``, where a divisor of zero gives zero."""

    divisor: torch.Tensor | float
    loss_scale: torch.Tensor | float

    def like(self, loss: torch.Tensor) -> torch.Tensor:
        """The seed in the loss's dtype, computed in float64 on its device; no host sync."""
        if not isinstance(self.divisor, torch.Tensor) and not isinstance(
            self.loss_scale, torch.Tensor
        ):
            value = self.loss_scale / self.divisor if self.divisor > 0 else 0.0
            return torch.full_like(loss, value, requires_grad=False)
        divisor = torch.as_tensor(self.divisor, dtype=torch.float64, device=loss.device)
        scale = torch.as_tensor(self.loss_scale, dtype=torch.float64, device=loss.device)
        return torch.where(divisor > 0, scale / divisor, 0.0).to(loss.dtype)


class Run:
    """The state of one step or evaluation on one rank.

    Args:
        parts: What runs share.
        inputs: Keyword arguments by stage and microbatch.
        seed: What backward starts from; None in an evaluation.
        window: How many sends may be open in each direction.
        reduce: Whether reducers take part.
    """

    def __init__(
        self, parts: Parts, inputs: Inputs, seed: Seed | None, *, window: int, reduce: bool = False
    ) -> None:
        self._parts = parts
        self._inputs = inputs
        self._seed = seed
        self._seed_tensor: torch.Tensor | None = None
        self._reducers = parts.reducers if reduce else {}
        self._transfers = Transfers(parts.links, window)
        self._arrived: dict[Slot, _Handed] = {}
        self._leaving: dict[Slot, _Handed] = {}
        self._flights: dict[Slot, Flight] = {}
        self._gradients: dict[Slot, list[torch.Tensor]] = {}
        self._leaving_gradients: dict[Slot, list[torch.Tensor]] = {}
        self._loss_sum: torch.Tensor | None = None
        self._coming: dict[int, WeightKeeper] = {}
        self._whole: dict[int, WeightKeeper] = {}

    def perform(self, instruction: Instruction) -> None:
        """Do what one instruction says."""
        _HANDLERS[instruction.operation](self, instruction)

    def finish(self) -> torch.Tensor:
        """Wait for the sends that are open, and give back the loss sum, float64, 0-d."""
        self._transfers.finish()
        if self._loss_sum is None:
            device = self._parts.links.transport.device
            return torch.zeros((), dtype=torch.float64, device=device)
        return self._loss_sum

    def release_whole(self) -> list[Exception]:
        """After a failure, release what is whole; gives back what failed on top of it."""
        return _release(self._whole)

    def release_coming(self) -> list[Exception]:
        """After a failure, release what was gathered and not awaited, which may wait for peers."""
        return _release(self._coming)

    def _gather(self, instruction: Instruction) -> None:
        keeper = self._parts.weights[instruction.stage]
        # Noted first: what raises half-way has to be released too.
        self._coming[id(keeper)] = keeper
        keeper.gather()

    def _await_weights(self, instruction: Instruction) -> None:
        keeper = self._parts.weights[instruction.stage]
        keeper.await_weights()
        self._whole[id(keeper)] = self._coming.pop(id(keeper))

    def _release(self, instruction: Instruction) -> None:
        keeper = self._parts.weights[instruction.stage]
        keeper.release()
        del self._whole[id(keeper)]

    def _expect_input(self, instruction: Instruction) -> None:
        self._transfers.expect_input(_slot(instruction))

    def _await_input(self, instruction: Instruction) -> None:
        slot = _slot(instruction)
        self._arrived[slot] = self._transfers.await_input(slot)

    def _forward(self, instruction: Instruction) -> None:
        slot = _slot(instruction)
        leaves: list[torch.Tensor] = []
        arguments: tuple[Any, ...] = ()
        if slot[0] > 0:
            crossing, tensors = self._arrived.pop(slot)
            leaves = enter(crossing, tensors)
            arguments = crossing.form.arguments(leaves)
        if slot[0] == self._parts.last_stage:
            flight = self._forward_to_loss(slot, arguments)
        else:
            flight = self._forward_to_boundary(slot, arguments)
        if self._seed is not None:
            flight.leaves = [leaf for leaf in leaves if leaf.requires_grad]
            self._flights[slot] = flight

    def _forward_to_boundary(self, slot: Slot, arguments: tuple[Any, ...]) -> Flight:
        stage, microbatch = slot
        output = self._parts.stages[stage](*arguments, **self._inputs(stage, microbatch))
        links = self._parts.links
        crossing, tensors, flight = leave(output, stage, links.boundary)
        if links.is_local(stage, stage + 1):
            self._arrived[stage + 1, microbatch] = (crossing, tensors)
        else:
            self._leaving[slot] = (crossing, tensors)
        return flight

    def _forward_to_loss(self, slot: Slot, arguments: tuple[Any, ...]) -> Flight:
        stage, microbatch = slot
        assert self._parts.split is not None
        for_stage, for_loss = self._parts.split.split(self._inputs(stage, microbatch))
        output = self._parts.stages[stage](*arguments, **for_stage)
        loss = self._parts.loss(output, **for_loss)
        _require_sum(loss)
        if self._loss_sum is None:
            self._loss_sum = torch.zeros((), dtype=torch.float64, device=loss.device)
        self._loss_sum += loss.detach()
        if self._seed is not None:
            self._gradients[slot] = [self._seed_for(loss)]
        return Flight([], [get_gradient_edge(loss) if loss.requires_grad else None], [])

    def _seed_for(self, loss: torch.Tensor) -> torch.Tensor:
        assert self._seed is not None
        if self._seed_tensor is None or self._seed_tensor.dtype != loss.dtype:
            self._seed_tensor = self._seed.like(loss)
        return self._seed_tensor

    def _send_output(self, instruction: Instruction) -> None:
        slot = _slot(instruction)
        self._transfers.send_output(slot, *self._leaving.pop(slot))

    def _expect_gradient(self, instruction: Instruction) -> None:
        slot = _slot(instruction)
        self._transfers.expect_gradient(slot, self._flights[slot].specs)

    def _await_gradient(self, instruction: Instruction) -> None:
        slot = _slot(instruction)
        self._gradients[slot] = self._transfers.await_gradient(slot)

    def _last_backward(self, instruction: Instruction) -> None:
        if instruction.stage in self._reducers:
            self._reducers[instruction.stage].last_backward()

    def _backward(self, instruction: Instruction) -> None:
        stage, microbatch = slot = _slot(instruction)
        # Where a gradient came, the output had arrived, so this does not wait.
        self._transfers.settle_output(slot)
        flight = self._flights.pop(slot)
        gradients = self._gradients.pop(slot)
        passed_on = run_backward(flight, gradients)
        if stage == 0:
            return
        if self._parts.links.is_local(stage, stage - 1):
            self._gradients[stage - 1, microbatch] = passed_on
        else:
            self._leaving_gradients[slot] = passed_on

    def _send_gradient(self, instruction: Instruction) -> None:
        slot = _slot(instruction)
        self._transfers.send_gradient(slot, self._leaving_gradients.pop(slot))

    def _reduce(self, instruction: Instruction) -> None:
        if instruction.stage in self._reducers:
            self._reducers[instruction.stage].reduce()


_HANDLERS: Mapping[Operation, Callable[[Run, Instruction], None]] = {
    Operation.EXPECT_INPUT: Run._expect_input,
    Operation.AWAIT_INPUT: Run._await_input,
    Operation.FORWARD: Run._forward,
    Operation.SEND_OUTPUT: Run._send_output,
    Operation.EXPECT_GRADIENT: Run._expect_gradient,
    Operation.AWAIT_GRADIENT: Run._await_gradient,
    Operation.LAST_BACKWARD: Run._last_backward,
    Operation.BACKWARD: Run._backward,
    Operation.SEND_GRADIENT: Run._send_gradient,
    Operation.REDUCE: Run._reduce,
    Operation.GATHER: Run._gather,
    Operation.AWAIT_WEIGHTS: Run._await_weights,
    Operation.RELEASE: Run._release,
}


def _release(gathered: dict[int, WeightKeeper]) -> list[Exception]:
    failures: list[Exception] = []
    while gathered:
        _, keeper = gathered.popitem()
        try:
            keeper.release()
        except Exception as failure:
            failures.append(failure)
    return failures


def _slot(instruction: Instruction) -> Slot:
    return instruction.stage, instruction.microbatch


def _require_sum(loss: object) -> None:
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        shape = getattr(loss, "shape", None)
        seen = type(loss).__name__ if shape is None else f"shape {list(shape)}"
        raise PipelineError(f"loss must return the sum over its microbatch, 0-d; got {seen}")
    if loss.dtype not in (torch.float32, torch.float64):
        raise PipelineError(
            f"loss must be float32 or float64, got {loss.dtype}; sum it in float32 at least"
        )
