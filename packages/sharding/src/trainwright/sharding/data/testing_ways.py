"""Every way to take a data-parallel step, as one value that tests run through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from trainwright.collectives import ShardSpec
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.parallel import data_parallel
from trainwright.sharding.data.policy import ShardPolicy
from trainwright.sharding.mesh import Mesh

Loss = Callable[[], torch.Tensor]


@attrs.frozen
class Way:
    """How a model is driven through its steps.

    Args:
        stage: What a rank keeps whole.
        hooks: Whether module hooks gather weights; else `Driven` calls ``await_weights`` and
            ``release``, as a pipeline's actions do.
        each: Whether every backward is reduced.
    """

    stage: int
    hooks: bool = True
    each: bool = False

    def __str__(self) -> str:
        return f"stage {self.stage}{' hooks' * self.hooks}{' each' * self.each}"

    def drive(self, model: nn.Module, mesh: Mesh, **policy: Any) -> Driven:
        """Make a model data-parallel in this way; ``policy`` gives further fields."""
        fields = {"alignment": 1, "reduce_each_backward": self.each, **policy}
        chosen = ShardPolicy(stage=self.stage, **fields)
        return Driven(self, mesh, data_parallel(model, mesh, chosen, hooks=self.hooks))


WAYS = (
    Way(0),
    Way(1),
    Way(2),
    Way(2, each=True),
    Way(3),
    Way(3, each=True),
    Way(3, hooks=False),
    Way(3, hooks=False, each=True),
)
"""Stages 0 to 3, stage 3 under both drivers, reduced once a step and at every backward."""


@attrs.frozen(eq=False)
class Driven:
    """A data-parallel model on one rank and the way it is driven."""

    way: Way
    mesh: Mesh
    parallel: DataParallel

    def accumulate(self, loss: Loss | None) -> None:
        """Run one micro-batch; None is a rank without a loss in it."""
        if not self.way.hooks:
            self.parallel.await_weights()
        if loss is not None:
            loss().backward()  # type: ignore[no-untyped-call]
        if not self.way.hooks:
            self.parallel.release()
            if self.way.each:
                self.parallel.reduce()

    def reduce(self, losses: Sequence[Loss | None]) -> None:
        """Go through a step up to the optimizer, announcing the last backward."""
        self.parallel.zero_grad()
        for number, loss in enumerate(losses, start=1):
            if number == len(losses) and not self.way.each:
                self.parallel.last_backward()
            self.accumulate(loss)
        self.parallel.reduce()
        self.parallel.wait()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the module's weights, whole."""
        self.parallel.await_weights()
        found = {n: p.detach().clone() for n, p in self.parallel.module.named_parameters()}
        self.parallel.release()
        return found

    def gradients(self) -> list[tuple[ShardSpec, torch.Tensor]]:
        """Return copies of the gradients that count on this rank, with their places."""
        found: list[tuple[ShardSpec, torch.Tensor]] = []
        for piece in self.parallel.pieces.values():
            if all(self.mesh.coordinate(axis) == 0 for axis in piece.spec.replicated):
                assert piece.parameter.grad is not None
                found.append((piece.spec, piece.parameter.grad.detach().clone()))
        return found


def assemble(
    parts: Iterable[Iterable[tuple[ShardSpec, torch.Tensor]]],
) -> dict[str, torch.Tensor]:
    """Return the plain model's tensors from the parts that count on each rank.

    Raises:
        AssertionError: An element is in no part, or in two.
    """
    whole: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for spec, values in (part for rank in parts for part in rank):
        whole.setdefault(spec.name, values.new_zeros(spec.global_shape))
        times.setdefault(spec.name, torch.zeros(spec.global_shape))
        seen = torch.zeros(spec.global_shape)
        spec.insert(torch.ones(spec.numel), seen)
        spec.insert(values, whole[spec.name])
        times[spec.name] += seen
    for name, count in times.items():
        assert bool((count == 1).all()), f"{name} is not held once: {count}"
    return whole
