"""One pass of one rank through its program: what is in flight, and what instructions do to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import attrs
import torch

from trainwright.pipeline_schedules.execute.boundary import Crossing
from trainwright.pipeline_schedules.execute.gradient_watch import GradientWatch
from trainwright.pipeline_schedules.execute.keepers import GatheredWeights
from trainwright.pipeline_schedules.execute.keywords import KeywordSplit
from trainwright.pipeline_schedules.execute.losses import Losses, Seed
from trainwright.pipeline_schedules.execute.output import (
    StageOutput,
    as_stage_output,
    skips_behind,
    skips_into,
)
from trainwright.pipeline_schedules.execute.program import Instruction, Operation, Program
from trainwright.pipeline_schedules.execute.protocol import Inputs, Loss, Reducer, WeightKeeper
from trainwright.pipeline_schedules.execute.result import StepResult
from trainwright.pipeline_schedules.execute.split import SplitProducts
from trainwright.pipeline_schedules.execute.stage_runner import Flight, enter, leave, run_backward
from trainwright.pipeline_schedules.execute.transfers import Links, Slot, Transfers
from trainwright.pipeline_schedules.execute.weight_gradients import WeightGradients

_EVALUATION_WINDOW = 2
_WHOLE = nullcontext()
_Handed = tuple[Crossing, list[torch.Tensor]]


@attrs.frozen(eq=False)
class Parts:
    """What every run of an executor shares.

    ``keywords`` is None on ranks without the last stage.
    """

    stages: Mapping[int, torch.nn.Module]
    links: Links
    loss: Loss
    keywords: KeywordSplit | None
    reducers: Mapping[int, Reducer]
    weights: Mapping[int, WeightKeeper]
    debts: WeightGradients
    splitting: SplitProducts

    @property
    def last_stage(self) -> int:
        """The stage whose output the loss is given."""
        return len(self.links.rank_of_stage) - 1


class Run:
    """The state of one step or evaluation on one rank.

    Args:
        parts: What runs share.
        program: What is run.
        inputs: Keyword arguments by stage and microbatch.
        seed: What backward starts from; None in an evaluation.
        reduce: Whether reducers take part.
    """

    def __init__(
        self,
        parts: Parts,
        program: Program,
        inputs: Inputs,
        seed: Seed | None,
        *,
        reduce: bool = False,
    ) -> None:
        self.gathered = GatheredWeights(parts.weights)
        self._parts = parts
        self._inputs = inputs
        self._seed = seed
        self._split = program.split
        self._reducers = parts.reducers if reduce else {}
        window = _EVALUATION_WINDOW if seed is None else program.peak_in_flight
        self._transfers = Transfers(parts.links, window)
        self._arrived: dict[Slot, _Handed] = {}
        self._leaving: dict[Slot, _Handed] = {}
        self._flights: dict[Slot, Flight] = {}
        self._gradients: dict[Slot, list[torch.Tensor]] = {}
        self._leaving_gradients: dict[Slot, list[torch.Tensor]] = {}
        self._replayed: set[Slot] = set()
        self._loss = Losses(seed)
        self._extra: dict[str, Losses] = {}
        self._watch = GradientWatch(parts.debts)

    def perform(self, instruction: Instruction) -> None:
        """Do what one instruction says."""
        _HANDLERS[instruction.operation](self, instruction)

    def finish(self) -> StepResult:
        """Wait for the sends that are open, and give back what there is to say.

        Raises:
            PipelineError: Weight gradients are owed that nobody computed.
        """
        self._transfers.finish()
        self._parts.debts.require_empty(self._parts.stages)
        loss_sum = self._loss.sum
        if loss_sum is None:
            device = self._parts.links.transport.device
            loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        return StepResult(
            loss_sum,
            losses={
                name: losses.sum for name, losses in self._extra.items() if losses.sum is not None
            },
            whole_backwards=self._watch.whole,
            unsplit=dict(self._watch.counts),
        )

    def _gather(self, instruction: Instruction) -> None:
        self.gathered.gather(instruction.stage)

    def _await_weights(self, instruction: Instruction) -> None:
        self.gathered.await_weights(instruction.stage)

    def _release(self, instruction: Instruction) -> None:
        self.gathered.release(instruction.stage)

    def _expect_input(self, instruction: Instruction) -> None:
        self._transfers.expect_input(_slot(instruction))

    def _await_input(self, instruction: Instruction) -> None:
        slot = _slot(instruction)
        self._arrived[slot] = self._transfers.await_input(slot)

    def _forward(self, instruction: Instruction) -> None:
        slot = _slot(instruction)
        leaves: list[torch.Tensor] = []
        arguments: tuple[Any, ...] = ()
        skips: dict[str, torch.Tensor] = {}
        if slot[0] > 0:
            crossing, tensors = self._arrived.pop(slot)
            leaves = enter(crossing, tensors)
            arguments = crossing.form.arguments(leaves)
            skips = crossing.form.skipping(leaves)
        self._parts.splitting.is_replayed = False
        if slot[0] == self._parts.last_stage:
            flight = self._forward_to_loss(slot, arguments, skips)
        else:
            flight = self._forward_to_boundary(slot, arguments, skips)
        if self._parts.splitting.is_replayed:
            self._replayed.add(slot)
        if self._seed is not None:
            flight.leaves = [leaf for leaf in leaves if leaf.requires_grad]
            self._flights[slot] = flight

    def _forward_to_boundary(
        self, slot: Slot, arguments: tuple[Any, ...], skips: Mapping[str, torch.Tensor]
    ) -> Flight:
        stage, microbatch = slot
        inputs = self._inputs(stage, microbatch)
        with self._parts.splitting if slot in self._split else _WHOLE:
            output = self._call(stage, arguments, inputs, skips)
        links = self._parts.links
        behind = skips_behind(stage, links.boundary, skips, output)
        crossing, tensors, flight = leave(output.output, behind, stage, links.boundary)
        self._add_extra(output, flight)
        if links.is_local(stage, stage + 1):
            self._arrived[stage + 1, microbatch] = (crossing, tensors)
        else:
            self._leaving[slot] = (crossing, tensors)
        return flight

    def _forward_to_loss(
        self, slot: Slot, arguments: tuple[Any, ...], skips: Mapping[str, torch.Tensor]
    ) -> Flight:
        stage, microbatch = slot
        assert self._parts.keywords is not None
        for_stage, for_loss = self._parts.keywords.split(self._inputs(stage, microbatch))
        with self._parts.splitting if slot in self._split else _WHOLE:
            output = self._call(stage, arguments, for_stage, skips)
            loss = self._parts.loss(output.output, **for_loss)
        skips_behind(stage, self._parts.links.boundary, skips, output)
        flight = Flight()
        self._loss.add(loss, "loss", flight)
        self._add_extra(output, flight)
        if self._seed is not None:
            self._gradients[slot] = []
        return flight

    def _call(
        self,
        stage: int,
        arguments: tuple[Any, ...],
        inputs: Mapping[str, Any],
        skips: Mapping[str, torch.Tensor],
    ) -> StageOutput:
        taken = skips_into(stage, self._parts.links.boundary, skips)
        return as_stage_output(self._parts.stages[stage](*arguments, **inputs, **taken))

    def _add_extra(self, output: StageOutput, flight: Flight) -> None:
        for name, loss in output.losses.items():
            losses = self._extra.setdefault(name, Losses(self._seed))
            losses.add(loss, f"loss {name}", flight)

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

    def _input_gradient(self, instruction: Instruction) -> None:
        parts, slot = self._parts, _slot(instruction)
        with self._watch.watching(slot, parts.stages[slot[0]]), parts.debts.collecting(slot):
            if slot not in self._replayed:
                self._backward(instruction)
                return
            self._replayed.remove(slot)
            # Layers that are recomputed run their forward again, and must make the same graph.
            with parts.splitting:
                self._backward(instruction)

    def _weight_gradient(self, instruction: Instruction) -> None:
        self._parts.debts.pay(_slot(instruction))

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
    Operation.INPUT_GRADIENT: Run._input_gradient,
    Operation.WEIGHT_GRADIENT: Run._weight_gradient,
    Operation.SEND_GRADIENT: Run._send_gradient,
    Operation.REDUCE: Run._reduce,
    Operation.GATHER: Run._gather,
    Operation.AWAIT_WEIGHTS: Run._await_weights,
    Operation.RELEASE: Run._release,
}


def _slot(instruction: Instruction) -> Slot:
    return instruction.stage, instruction.microbatch
