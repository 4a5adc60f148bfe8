"""Contestants that do not communicate: what training costs without any parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tools.bench.data_parallel.contestants import Contestant, Recipe
from tools.bench.data_parallel.gpt import Batch, build_model, mean_loss
from trainwright.collectives import Communicator


def single(world: Communicator, recipe: Recipe) -> Contestant:
    """Forward, backward, clipping and the whole update; each rank trains on its own."""
    return Single(recipe)


def floor(world: Communicator, recipe: Recipe) -> Contestant:
    """Forward, backward and half an update: the work that two ranks cannot but do."""
    return _Floor(recipe)


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, max_norm: float
) -> Iterator[str]:
    """Train on one batch as PyTorch's tutorials do, naming each phase when it is over."""
    optimizer.zero_grad()
    loss = mean_loss(model, batch)
    yield "forward"
    torch.autograd.backward(loss)
    yield "backward"
    clip_grad_norm_(model.parameters(), max_norm)
    yield "clip"
    optimizer.step()
    yield "optimizer"


class Single:
    """Trains one process's model on the batches that it gets."""

    def __init__(self, recipe: Recipe) -> None:
        self._model = build_model(recipe.shape)
        self._optimizer = recipe.make_optimizer(self._model.parameters())

    def step(self, batch: Batch, max_norm: float) -> Iterator[str]:
        """Train on one batch."""
        return plain_step(self._model, self._optimizer, batch, max_norm)

    def whole_weights(self) -> Mapping[str, torch.Tensor]:
        """Return the model's weights."""
        return self._model.state_dict()


class _Floor:
    def __init__(self, recipe: Recipe) -> None:
        self._model = build_model(recipe.shape)
        self._pairs = [
            (parameter, nn.Parameter(_first_half(parameter.detach())))
            for parameter in self._model.parameters()
        ]
        self._optimizer = recipe.make_optimizer([half for _, half in self._pairs])

    def step(self, batch: Batch, max_norm: float) -> Iterator[str]:
        self._model.zero_grad()
        loss = mean_loss(self._model, batch)
        yield "forward"
        torch.autograd.backward(loss)
        yield "backward"
        for parameter, half in self._pairs:
            assert parameter.grad is not None
            half.grad = _first_half(parameter.grad)
        self._optimizer.step()
        yield "optimizer"

    def whole_weights(self) -> Mapping[str, torch.Tensor]:
        raise NotImplementedError("half an update trains nothing worth comparing")


def _first_half(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(-1)
    return flat[: flat.numel() // 2]
