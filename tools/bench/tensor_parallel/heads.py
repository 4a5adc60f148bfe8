"""The contestants of a head and its cross-entropy over a large vocabulary."""

# Shapes: T tokens, D model, V vocabulary; a shard keeps its letters.

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import attrs
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from trainwright.collectives import Communicator
from trainwright.collectives.differentiable import replicate_to_partial
from trainwright.sharding.tensor import (
    linear_cross_entropy,
    linear_cross_entropy_sum,
    vocab_parallel_cross_entropy,
)


@attrs.frozen
class HeadShape:
    """The sizes of a head and of what goes in."""

    vocabulary: int
    width: int
    tokens: int

    def logits_bytes(self, ranks: int) -> int:
        """Return the bytes of one rank's logits in float32."""
        return 4 * self.tokens * self.vocabulary // ranks


SHAPES = {
    "small": HeadShape(vocabulary=128 * 1024, width=256, tokens=1024),
    "wide": HeadShape(vocabulary=128 * 1024, width=1024, tokens=1024),
    "tiny": HeadShape(vocabulary=512, width=16, tokens=640),
}

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Communicator], torch.Tensor]
"""Of hidden [T, D], this rank's weight [V/tp, D] and labels [T]: the sum of the losses."""


class HeadContestant:
    """One way to get from hidden states to the loss and back; one instance on each rank.

    Args:
        shape: The sizes.
        world: The ranks that the vocabulary is cut over.
        loss: The way.
        around: What forward and backward run in.
    """

    def __init__(
        self,
        shape: HeadShape,
        world: Communicator,
        loss: Loss,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._world = world
        self._loss = loss
        self._around = around
        generator = torch.Generator().manual_seed(0)
        weight_VD = torch.randn(shape.vocabulary, shape.width, generator=generator)
        weight_VD *= shape.width**-0.5
        hidden_TD = torch.randn(shape.tokens, shape.width, generator=generator)
        self._labels_T = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator)
        self.hidden_TD = hidden_TD.requires_grad_()
        self.weight_VD = weight_VD.chunk(world.size)[world.rank].clone().requires_grad_()
        self.total = torch.zeros(())

    def step(self) -> None:
        """Run forward and backward once; gradients are made anew."""
        self.hidden_TD.grad = self.weight_VD.grad = None
        with self._around():
            total = self._loss(self.hidden_TD, self.weight_VD, self._labels_T, self._world)
            torch.autograd.backward(total / len(self._labels_T))
        self.total = total.detach()

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return the loss and this rank's gradients of the last step."""
        assert self.hidden_TD.grad is not None
        assert self.weight_VD.grad is not None
        return {
            "loss": self.total,
            "input": self.hidden_TD.grad,
            "weight": self.weight_VD.grad,
        }

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return of a whole result what ``results`` has under its name."""
        return whole.chunk(self._world.size)[self._world.rank] if name == "weight" else whole


def unchunked(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, tp: Communicator
) -> torch.Tensor:
    """The product of all tokens, then vocab_parallel_cross_entropy."""
    logits_TV = F.linear(replicate_to_partial(hidden_TD, tp), weight_VD)
    return vocab_parallel_cross_entropy(logits_TV, labels_T, tp).sum()


def chunked(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, tp: Communicator
) -> torch.Tensor:
    """The sum with gradients computed in the forward."""
    return linear_cross_entropy_sum(hidden_TD, weight_VD, labels_T, tp)


def by_token(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, tp: Communicator
) -> torch.Tensor:
    """The losses of all tokens, with the product computed again in the backward."""
    return linear_cross_entropy(hidden_TD, weight_VD, labels_T, tp).sum()


class _LossParallel:
    """PyTorch's cross-entropy over a vocabulary that DTensor has cut."""

    def __init__(self, ranks: int) -> None:
        self._mesh: DeviceMesh = init_device_mesh("cpu", (ranks,))

    def __call__(
        self,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_T: torch.Tensor,
        tp: Communicator,
    ) -> torch.Tensor:
        hidden = self._placed(hidden_TD, Replicate())
        logits = F.linear(hidden, self._placed(weight_VD, Shard(0)))
        total = F.cross_entropy(logits, self._placed(labels_T, Replicate()), reduction="sum")
        assert isinstance(total, DTensor)
        return total.to_local()

    def _placed(self, tensor: torch.Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(tensor, self._mesh, (placement,), run_check=False)


def of_one_process(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, tp: Communicator
) -> torch.Tensor:
    """PyTorch's own on all of the vocabulary; each rank for itself."""
    return F.cross_entropy(F.linear(hidden_TD, weight_VD), labels_T, reduction="sum")


def builders() -> dict[str, Callable[[HeadShape, Communicator], HeadContestant]]:
    """Return how to build each contestant on the ranks of a communicator, by name."""

    def torch_loss_parallel(shape: HeadShape, world: Communicator) -> HeadContestant:
        loss = _LossParallel(world.size)
        return HeadContestant(shape, world, loss, around=loss_parallel)

    return {
        "loss_parallel": torch_loss_parallel,
        "unchunked": lambda shape, world: HeadContestant(shape, world, unchunked),
        "chunked": lambda shape, world: HeadContestant(shape, world, chunked),
        "by_token": lambda shape, world: HeadContestant(shape, world, by_token),
    }
