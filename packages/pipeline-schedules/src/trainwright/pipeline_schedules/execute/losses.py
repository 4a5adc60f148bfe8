"""The losses of a run: their sums, and what backward starts from."""

from __future__ import annotations

import attrs
import torch
from torch.autograd.graph import get_gradient_edge

from trainwright.pipeline_schedules.execute.errors import PipelineError
from trainwright.pipeline_schedules.execute.stage_runner import Flight


@attrs.frozen(eq=False)
class Seed:
    """What backward starts from, ``loss_scale / divisor``, where a divisor of zero gives zero."""

    divisor: torch.Tensor | float
    loss_scale: torch.Tensor | float

    def like(self, loss: torch.Tensor) -> torch.Tensor:
        """The seed in the loss's dtype, computed in float64 on its device; no host sync."""
        if not isinstance(self.divisor, torch.Tensor) and not isinstance(
            self.loss_scale, torch.Tensor
        ):
            value = self.loss_scale / self.divisor if self.divisor > 0 else 0.0
            return torch.full_like(loss, value, requires_grad=False)
        divisor = torch.as_tensor(self.divisor, dtype=torch.float64, device=loss.device)
        scale = torch.as_tensor(self.loss_scale, dtype=torch.float64, device=loss.device)
        return torch.where(divisor > 0, scale / divisor, 0.0).to(loss.dtype)


class Losses:
    """Adds up the losses of one kind over a run.

    Args:
        seed: What backward starts from; None in an evaluation.
    """

    def __init__(self, seed: Seed | None) -> None:
        self._seed = seed
        self._seed_tensor: torch.Tensor | None = None
        self.sum: torch.Tensor | None = None

    def add(self, loss: object, name: str, flight: Flight) -> None:
        """Add a loss, float64, and let the backward of a flight start from it.

        Raises:
            PipelineError: It is no 0-d tensor of float32 or float64.
        """
        checked = _require_sum(loss, name)
        if self.sum is None:
            self.sum = torch.zeros((), dtype=torch.float64, device=checked.device)
        self.sum += checked.detach()
        if self._seed is not None and checked.requires_grad:
            flight.losses.append((get_gradient_edge(checked), self._seed_for(checked, self._seed)))

    def _seed_for(self, loss: torch.Tensor, seed: Seed) -> torch.Tensor:
        if self._seed_tensor is None or self._seed_tensor.dtype != loss.dtype:
            self._seed_tensor = seed.like(loss)
        return self._seed_tensor


def _require_sum(loss: object, name: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        shape = getattr(loss, "shape", None)
        seen = type(loss).__name__ if shape is None else f"shape {list(shape)}"
        raise PipelineError(f"{name} must return the sum over its microbatch, 0-d; got {seen}")
    if loss.dtype not in (torch.float32, torch.float64):
        raise PipelineError(
            f"{name} must be float32 or float64, got {loss.dtype}; sum it in float32 at least"
        )
    return loss
