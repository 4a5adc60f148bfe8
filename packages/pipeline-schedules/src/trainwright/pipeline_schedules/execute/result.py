"""What a run gives back: the loss sum and, where asked for, what happened when."""

from __future__ import annotations

import attrs
import torch


@attrs.frozen
class Timed:
    """When one operation ran on this rank, by the host's clock, in seconds from the run's start.

    On an accelerator these are the times at which work was handed to it.

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
    """

    loss_sum: torch.Tensor
    timeline: tuple[Timed, ...] | None = None
