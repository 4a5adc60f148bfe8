"""The executor: runs one rank's part of a schedule on this rank's stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import attrs
import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function

from trainwright.collectives import PeerFailedError
from trainwright.pipeline_schedules.execute.boundary import BoundarySpec
from trainwright.pipeline_schedules.execute.errors import PipelineError
from trainwright.pipeline_schedules.execute.keywords import KeywordSplit
from trainwright.pipeline_schedules.execute.losses import Seed
from trainwright.pipeline_schedules.execute.program import (
    Instruction,
    Program,
    compile_program,
    forward_schedule,
)
from trainwright.pipeline_schedules.execute.protocol import (
    Inputs,
    Loss,
    Reducer,
    Transport,
    WeightKeeper,
)
from trainwright.pipeline_schedules.execute.requirements import (
    require_fit,
    require_gathered,
    require_own,
    require_skips,
)
from trainwright.pipeline_schedules.execute.result import StepResult
from trainwright.pipeline_schedules.execute.run import Parts, Run
from trainwright.pipeline_schedules.execute.split import SplitProducts
from trainwright.pipeline_schedules.execute.stopwatch import stopwatch_for
from trainwright.pipeline_schedules.execute.transfers import Links
from trainwright.pipeline_schedules.execute.weight_gradients import WeightGradients
from trainwright.pipeline_schedules.lowering import lower
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.verify import verify
from trainwright.pipeline_schedules.weight_plan import WeightPlan

_NO_REDUCERS: Mapping[int, Reducer] = MappingProxyType({})
_NO_WEIGHTS: Mapping[int, WeightKeeper] = MappingProxyType({})
_NO_SPAN = contextlib.nullcontext()


class PipelineExecutor:
    """Runs a schedule on this rank's stages, with the gradients of a serial run.

    A stage is called ``stage(*boundary, **inputs(stage, microbatch))``: the first without
    boundary arguments, the others with what the stage before returned, a tensor as one argument,
    a tuple as several, a dict as one dict. On the last stage the same inputs serve
    ``loss(output, **inputs)``; stage and loss each get the names that they have parameters for.
    A stage must not change its boundary inputs in place.

    Gradients accumulate in ``.grad``, over microbatches and over steps until they are zeroed.

    Where the schedule splits a backward, I computes the gradient of the stage's input and W the
    gradients of weights that products have (`SplitProducts` says which); what else has weights,
    such as a norm or an embedding, gets their gradients in I, and `StepResult.unsplit` names it.
    Nothing is computed twice; only inputs and gradients of products are kept from I to W.

    Args:
        schedule: Lowered, or to be lowered here. Here, the stages that have ``weights`` are
            gathered once a step; another `WeightPlan` is given to `lower`.
        stages: This rank's stages by their number.
        transport: Carries tensors between the ranks of the pipeline; a ``Communicator`` is one.
        loss: Sum over the tokens of a microbatch, 0-d, at least float32.
        reducers: For some stages, what adds their gradients over data-parallel ranks.
        weights: For some stages, what makes their sharded weights whole between GATHER and
            RELEASE, in steps and in evaluations. After each of these, also one that raised, they
            are released.
        boundary: Declared shapes, and skips; a boundary without declared shapes sends a header of
            256 bytes ahead of each output, which the receiving host reads, and shapes may differ
            each time.
        receive_ahead: Whether receives may be started before sends that stand in front of them.
            The transport then has to pair messages by tag (Gloo and threads do, NCCL does not).
            None: on CPU only.

    Raises:
        PipelineError: Stages, reducers, weights or transport do not fit the schedule.
        ScheduleError: The schedule does not verify.

    Communicates: in a step, for each microbatch and each boundary to another rank, the output
    one way and the gradients of its differentiable tensors the other way.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, torch.nn.Module],
        transport: Transport,
        *,
        loss: Loss,
        reducers: Mapping[int, Reducer] = _NO_REDUCERS,
        weights: Mapping[int, WeightKeeper] = _NO_WEIGHTS,
        boundary: BoundarySpec | None = None,
        receive_ahead: bool | None = None,
    ) -> None:
        require_fit(schedule, stages, transport)
        require_own(schedule, transport, "reducers", reducers)
        require_own(schedule, transport, "weights", weights)
        if schedule.lowered:
            verify(schedule)
            require_gathered(schedule, transport, weights)
        if receive_ahead is None:
            receive_ahead = transport.device.type == "cpu"
        ranks = schedule.rank_of_stage
        declared = BoundarySpec({}) if boundary is None else boundary
        require_skips(declared.skips, schedule.num_stages)
        last = schedule.num_stages - 1
        plan = WeightPlan(stages=weights)
        debts = WeightGradients()
        self._schedule = schedule if schedule.lowered else lower(schedule, plan)
        self._parts = Parts(
            stages=dict(stages),
            links=Links(transport, ranks, declared, receive_ahead),
            loss=loss,
            keywords=KeywordSplit(stages[last], loss) if last in stages else None,
            reducers=dict(reducers),
            weights=dict(weights),
            debts=debts,
            splitting=SplitProducts(debts),
        )
        self._program = self._compile(self._schedule)
        self._evaluations: dict[int, Program] = {}

    @property
    def schedule(self) -> Schedule:
        """The lowered schedule that a step runs."""
        return self._schedule

    def step(
        self,
        inputs: Inputs,
        *,
        divisor: torch.Tensor | float,
        loss_scale: torch.Tensor | float = 1.0,
        reduce: bool = True,
        timed: bool = False,
    ) -> StepResult:
        """Run forward and backward of all microbatches.

        Backward starts from ``loss_scale / divisor``, and no other factor appears anywhere.

        Args:
            inputs: ``inputs(stage, microbatch)``, keyword arguments; called once for each.
            divisor: Number of valid tokens of the whole global batch, over all data-parallel
                ranks and all steps that accumulate together. Zero gives zero gradients.
            loss_scale: Factor of the loss scaler.
            reduce: Whether reducers take part; False for all but the last of several steps that
                accumulate together.
            timed: Whether to measure a timeline.

        Returns:
            The loss sum, on the rank of the last stage.

        Raises:
            PipelineError: The schedule has no backward, gradients are switched off, or the
                divisor is negative.
        """
        if self._schedule.forward_only:
            raise PipelineError("a forward-only schedule has no step; call evaluate")
        if not torch.is_grad_enabled():
            raise PipelineError("step needs gradients but they are switched off; call evaluate")
        if not isinstance(divisor, torch.Tensor) and not divisor >= 0:
            raise PipelineError(f"divisor must be the number of valid tokens, got {divisor}")
        seed = Seed(divisor, loss_scale)
        run = Run(self._parts, self._program, inputs, seed, reduce=reduce)
        return self._execute(self._program, run, timed)

    def evaluate(self, inputs: Inputs, num_microbatches: int, *, timed: bool = False) -> StepResult:
        """Run forwards only, in evaluation mode; weights, gradients and modes stay as they are.

        Args:
            inputs: As in `step`.
            num_microbatches: Any number from 1, the same on all ranks.
            timed: Whether to measure a timeline.

        Returns:
            The loss sum, on the rank of the last stage.
        """
        if num_microbatches not in self._evaluations:
            rank = self._parts.links.transport.rank
            schedule = forward_schedule(self._schedule, rank, num_microbatches)
            self._evaluations[num_microbatches] = self._compile(schedule)
        program = self._evaluations[num_microbatches]
        run = Run(self._parts, program, inputs, None)
        with torch.no_grad(), _evaluation_mode(self._parts.stages):
            return self._execute(program, run, timed)

    def _compile(self, schedule: Schedule) -> Program:
        parts, links = self._parts, self._parts.links
        rank = links.transport.rank
        return compile_program(schedule, rank, parts.reducers, parts.weights, links.receive_ahead)

    def _execute(self, program: Program, run: Run, timed: bool) -> StepResult:
        # Asked once a run: opening a range costs more than starting most transfers.
        profiling = autograd_profiler._is_profiler_enabled
        watch = stopwatch_for(self._parts.links.transport.device) if timed else None
        instruction: Instruction | None = None
        try:
            for instruction in program.instructions:
                if watch is not None:
                    watch.start()
                with record_function(instruction.label) if profiling else _NO_SPAN:
                    run.perform(instruction)
                if watch is not None:
                    watch.stop(instruction)
            instruction = None
            result = run.finish()
        except BaseException as cause:
            self._give_up(cause, instruction, run)
            raise
        if watch is None:
            return result
        return attrs.evolve(result, timeline=watch.read(), began_s=watch.began_s)

    def _give_up(self, cause: BaseException, instruction: Instruction | None, run: Run) -> None:
        """Say where it happened, release weights and tell the peers."""
        transport = self._parts.links.transport
        place = "pipeline: last sends" if instruction is None else instruction.label
        cause.add_note(f"in {place} on rank {transport.rank} of the pipeline")
        self._parts.debts.clear()
        failures = run.gathered.release_whole()
        self._tell(cause)
        # Last, since it may wait for data-parallel peers that wait for whom we had to tell.
        for failure in failures + run.gathered.release_coming():
            cause.add_note(f"and releasing weights failed: {failure!r}")

    def _tell(self, cause: BaseException) -> None:
        """Stop the other ranks of the pipeline, unless one of them stopped this one."""
        transport = self._parts.links.transport
        abort = getattr(transport, "abort", None)
        if abort is None or transport.size == 1 or isinstance(cause, PeerFailedError):
            return
        try:
            abort(cause)
        except Exception as failure:
            cause.add_note(f"and telling the other ranks failed: {failure!r}")


@contextlib.contextmanager
def _evaluation_mode(stages: Mapping[int, torch.nn.Module]) -> Iterator[None]:
    """Switch to evaluation mode and put every submodule back as it was."""
    training = [m for stage in stages.values() for m in stage.modules() if m.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
