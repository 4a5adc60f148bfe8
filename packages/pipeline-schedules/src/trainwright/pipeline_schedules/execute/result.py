"""What a run gives back: the loss sum and, where asked for, what happened when."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch


@attrs.frozen
class Timed:
    """When one operation ran on this rank, in seconds from the run's start.

    On the CPU that is by the host's clock. On an accelerator these are the times at which the
    stream passed events before and after its work, waits for transfers included.

    Attributes:
        operation: ``F``, ``B``, ``SEND_F``, ``RECV_F`` (started), ``wait for input``, ….
        stage: Its stage.
        microbatch: Its microbatch, -1 for what concerns the whole stage.
        start_s: Start.
        stop_s: End.
    """

    operation: str
    stage: int
    microbatch: int
    start_s: float
    stop_s: float


@attrs.frozen(eq=False)
class StepResult:
    """What a step or an evaluation gives back.

    Attributes:
        loss_sum: Sum of the losses of all microbatches, neither divided nor scaled, float64, 0-d,
            without history; zero on ranks that do not have the last stage.
        timeline: What this rank did, in order, where it was asked for.
        began_s: When the run began, by `time.perf_counter` of this process; 0 without a timeline.
        losses: Likewise the sums of the further losses of this rank's stages, by name.
        whole_backwards: How many backwards that the schedule splits ran whole in I, because
            nothing in them could be split.
        unsplit: For each module of this rank some of whose gradients came in I where the schedule
            has a W for them: in how many backwards.
    """

    loss_sum: torch.Tensor
    timeline: tuple[Timed, ...] | None = None
    began_s: float = 0.0
    losses: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    whole_backwards: int = 0
    unsplit: Mapping[str, int] = attrs.field(factory=dict)
