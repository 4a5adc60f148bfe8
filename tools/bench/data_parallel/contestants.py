"""What a contestant is, and the list of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import attrs
import torch

from tools.bench.data_parallel.gpt import Batch, Shape
from trainwright.collectives import Communicator

MAX_NORM = 1.0
"""The norm that gradients are clipped to wherever times or memory are taken."""


class Contestant(Protocol):
    """One way to train the model on all ranks; one instance on each."""

    def step(self, batch: Batch, max_norm: float) -> Iterator[str]:
        """Train on this rank's batch, yielding the name of each phase when it is over.

        Args:
            batch: its tokens.
            max_norm: the norm that the gradient of all ranks' mean loss is clipped to.
        """

    def whole_weights(self) -> Mapping[str, torch.Tensor]:
        """Return all weights under the model's own names; every rank calls it."""


@attrs.frozen
class Recipe:
    """What is the same for all contestants.

    Args:
        shape: the model.
        optimizer: class of the optimizer.
        settings: its settings, without ``fused``.
        fuses: whether those who ask for it get the fused optimizer.
    """

    shape: Shape
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    settings: Mapping[str, Any] = attrs.field(
        factory=lambda: {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    )
    fuses: bool = True

    def make_optimizer(
        self, parameters: Iterable[torch.Tensor], *, fused: bool = True
    ) -> torch.optim.Optimizer:
        """Return the optimizer; not fused is what it is by default on a CPU."""
        return self.optimizer(parameters, **self.settings_of(fused))

    def settings_of(self, fused: bool) -> dict[str, Any]:
        """Return all settings of the optimizer."""
        return {**self.settings, "fused": True} if fused and self.fuses else dict(self.settings)


def take_step(contestant: Contestant, batch: Batch, max_norm: float = MAX_NORM) -> None:
    """Let a contestant train on one batch."""
    for _ in contestant.step(batch, max_norm):
        pass


Build = Callable[[Communicator, Recipe], Contestant]


def builders() -> dict[str, Build]:
    """Return how to build each contestant on the ranks of a communicator, by name."""
    from tools.bench.data_parallel import alone, ours, peers

    return {
        "single": alone.single,
        "floor": alone.floor,
        "ddp": peers.ddp,
        "ddp_fused": peers.ddp_fused,
        "zero_redundancy": peers.zero_redundancy,
        "fsdp2": peers.fsdp2,
        "fsdp2_fused": peers.fsdp2_fused,
        "stage0": ours.stage(0),
        "stage1": ours.stage(1),
        "stage2": ours.stage(2),
        "stage3": ours.stage(3),
    }
