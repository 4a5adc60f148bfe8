"""Lion: the sign of a momentum, as an optimizer of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from trainwright.integration.errors import ConfigError


class Lion(torch.optim.Optimizer):
    """Moves each element by the learning rate, up or down as a mean of its gradients says.

    It keeps one momentum, in the dtype of the parameter. An element's update depends on that
    element alone, so that any piece of a parameter will do. A step takes the same few passes over
    memory however many parameters there are.

    Every element moves by the whole rate: take a rate three to ten times smaller than AdamW's, and
    a weight decay as many times greater.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: How much of the momentum is in what is signed, and how much of it is kept.
        weight_decay: Share of a weight that is taken off beside, times the learning rate.

    Raises:
        ConfigError: a value is out of its range.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0.0 or not weight_decay >= 0.0:
            raise ConfigError(f"Lion needs lr and weight_decay from 0, got {lr}, {weight_decay}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(f"Lion needs betas from 0 to below 1, got {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            graded = [parameter for parameter in group["params"] if parameter.grad is not None]
            if graded:
                self._update(graded, group)
        return loss

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["exp_avg"] for parameter in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        lr, (signed, kept) = group["lr"], group["betas"]
        updates = torch._foreach_mul(momenta, signed)
        torch._foreach_add_(updates, gradients, alpha=1 - signed)
        torch._foreach_sign_(updates)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-lr)
        torch._foreach_mul_(momenta, kept)
        torch._foreach_add_(momenta, gradients, alpha=1 - kept)
