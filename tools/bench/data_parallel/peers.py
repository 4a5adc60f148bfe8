"""PyTorch's own ways to train on several ranks, each as its documentation advises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tools.bench.data_parallel.alone import plain_step
from tools.bench.data_parallel.contestants import Contestant, Recipe
from tools.bench.data_parallel.gpt import Batch, build_model, mean_loss
from trainwright.collectives import Communicator


def ddp(world: Communicator, recipe: Recipe) -> Contestant:
    """DistributedDataParallel with gradients as views of its buckets, optimizer as by default."""
    return _replicated(recipe, fused=False)


def ddp_fused(world: Communicator, recipe: Recipe) -> Contestant:
    """DistributedDataParallel with a fused optimizer."""
    return _replicated(recipe, fused=True)


def zero_redundancy(world: Communicator, recipe: Recipe) -> Contestant:
    """DistributedDataParallel with ZeroRedundancyOptimizer over a fused optimizer."""
    model = _wrap(recipe)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=recipe.optimizer,
        parameters_as_bucket_view=True,
        **recipe.settings_of(fused=True),
    )
    return _Replicated(model, optimizer)


def fsdp2(world: Communicator, recipe: Recipe) -> Contestant:
    """fully_shard on every block and on the rest, optimizer as by default."""
    return _Sharded(world, recipe, fused=False)


def fsdp2_fused(world: Communicator, recipe: Recipe) -> Contestant:
    """fully_shard with a fused optimizer."""
    return _Sharded(world, recipe, fused=True)


def _replicated(recipe: Recipe, *, fused: bool) -> Contestant:
    model = _wrap(recipe)
    return _Replicated(model, recipe.make_optimizer(model.parameters(), fused=fused))


def _wrap(recipe: Recipe) -> DistributedDataParallel:
    return DistributedDataParallel(build_model(recipe.shape), gradient_as_bucket_view=True)


class _Replicated:
    def __init__(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def step(self, batch: Batch, max_norm: float) -> Iterator[str]:
        return plain_step(self._model, self._optimizer, batch, max_norm)

    def whole_weights(self) -> Mapping[str, torch.Tensor]:
        module: nn.Module = self._model.module
        return module.state_dict()


class _Sharded:
    def __init__(self, world: Communicator, recipe: Recipe, *, fused: bool) -> None:
        self._model = build_model(recipe.shape)
        mesh = init_device_mesh("cpu", (world.size,))
        for layer in self._model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = recipe.make_optimizer(self._model.parameters(), fused=fused)

    def step(self, batch: Batch, max_norm: float) -> Iterator[str]:
        self._optimizer.zero_grad()
        loss = mean_loss(self._model, batch)
        yield "forward"
        torch.autograd.backward(loss)
        yield "backward"
        parameters = list(self._model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        clip_grads_with_norm_(parameters, max_norm, norm)
        yield "clip"
        self._optimizer.step()
        yield "optimizer"

    def whole_weights(self) -> Mapping[str, torch.Tensor]:
        weights = self._model.state_dict()
        return {
            name: weight.full_tensor() if isinstance(weight, DTensor) else weight
            for name, weight in weights.items()
        }
