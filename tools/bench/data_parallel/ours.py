"""The four stages of trainwright.sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tools.bench.data_parallel.contestants import Build, Contestant, Recipe
from tools.bench.data_parallel.gpt import Batch, Block, build_model, mean_loss
from trainwright.collectives import Communicator
from trainwright.sharding import Mesh, MeshShape, ShardPolicy, data_parallel, one_norm
from trainwright.sharding.data.units import by_class
from trainwright.stability_guards import clip_, clip_coefficient


def stage(number: int) -> Build:
    """Return how to build one stage; the third gathers the weights block by block."""

    def build(world: Communicator, recipe: Recipe) -> Contestant:
        units = by_class(Block) if number == 3 else None
        return _Staged(world, recipe, ShardPolicy(stage=number, units=units))

    return build


class _Staged:
    def __init__(self, world: Communicator, recipe: Recipe, policy: ShardPolicy) -> None:
        self._world_size = world.size
        self._gathers = policy.stage == 3
        self._mesh = Mesh(world, MeshShape(dp=world.size))
        self._parallel = data_parallel(build_model(recipe.shape), self._mesh, policy)
        self._pieces = list(self._parallel.pieces.values())
        self._optimizer = recipe.make_optimizer([piece.parameter for piece in self._pieces])

    def step(self, batch: Batch, max_norm: float) -> Iterator[str]:
        parallel = self._parallel
        parallel.zero_grad()
        parallel.last_backward()
        # Gradients are sums over the ranks, so the mean over them is taken in the loss.
        loss = mean_loss(parallel.module, batch) / self._world_size
        yield "forward"
        torch.autograd.backward(loss)
        yield "backward"
        parallel.reduce()
        yield "reduce"
        parallel.wait()
        yield "wait"
        totals = one_norm(self._mesh, self._pieces, loss_sum=loss.detach())
        yield "norm"
        self._clip(totals.norm, max_norm)
        yield "clip"
        self._optimizer.step()
        yield "optimizer"
        parallel.publish()
        yield "publish"

    def _clip(self, norm: torch.Tensor, max_norm: float) -> None:
        if self._optimizer.defaults.get("fused"):
            # It divides by this while it reads the gradients anyway.
            scale = clip_coefficient(norm, max_norm).float().reciprocal()
            self._optimizer.grad_scale = scale  # type: ignore[attr-defined]
            return
        gradients = [g for piece in self._pieces if (g := piece.parameter.grad) is not None]
        clip_(gradients, norm, max_norm)

    def whole_weights(self) -> Mapping[str, torch.Tensor]:
        parallel = self._parallel
        if self._gathers:
            parallel.gather()
            parallel.await_weights()
        weights = {name: p.detach().clone() for name, p in parallel.module.named_parameters()}
        if self._gathers:
            parallel.release()
        return weights
