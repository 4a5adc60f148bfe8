"""A loss scale that follows its gradients on the device, so that the host need not wait."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from trainwright.precision.protocol import SteppableOptimizer
from trainwright.precision.scale_settings import Settings


@attrs.frozen(eq=False)
class Verdict:
    """Whether a step was applied. ``bool`` of it waits until the device has come so far."""

    _non_finite: torch.Tensor

    def __bool__(self) -> bool:
        return not bool(self._non_finite)


@attrs.frozen
class Counters:
    """The scale and what is counted, as numbers of the host."""

    scale: float
    growth: int
    patience: int
    num_applied: int
    num_skipped: int
    failed: bool = False


class ScaleOnDevice:
    """The counters in memory of a device; each float64 number holds a float32 or a count exactly.

    Args:
        counters: where it begins.
        device: of the flags that say what was met.
    """

    def __init__(self, counters: Counters, device: torch.device) -> None:
        self._state = torch.tensor(
            [float(value) for value in attrs.astuple(counters)], dtype=torch.float64, device=device
        )
        self._arrival: Any = None
        self._copies: dict[torch.device, torch.Tensor] = {}
        self._send()

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._state.device

    def scale(self, device: torch.device) -> torch.Tensor:
        """Return the scale, float32 and 0-d."""
        if device not in self._copies:
            self._copies[device] = self._state[0].to(device, torch.float32)
        return self._copies[device]

    def advance(self, non_finite: torch.Tensor, settings: Settings, min_scale: float) -> None:
        """End an iteration, by the arithmetic of the host; none of it is waited for.

        Args:
            non_finite: 0-d, zero where all gradients were finite.
            settings: what the scaler was told.
            min_scale: what the scale must not fall below.
        """
        scale, growth, patience, applied, skipped, failed = self._state.unbind()
        bad = non_finite.to(self._state.device) != 0
        smaller = _rounded(scale * settings.backoff_factor)
        is_allowed = (smaller >= min_scale) & (smaller > 0)
        falls = bad & (patience <= 1)
        grows = ~bad & (growth + 1 >= settings.growth_interval)
        larger = _rounded(scale * settings.growth_factor)
        larger = torch.where(larger.isfinite(), larger, scale)
        left = (patience - bad.double()).clamp_min(1)
        refilled = ~bad if settings.hysteresis_refills else grows
        self._state = torch.stack(
            [
                torch.where(falls & is_allowed, smaller, torch.where(grows, larger, scale)),
                torch.where(bad | grows, 0.0, growth + 1),
                torch.where(refilled, float(settings.hysteresis), left),
                applied + ~bad,
                skipped + bad,
                torch.maximum(failed, (falls & ~is_allowed).double()),
            ]
        )
        self._copies = {}
        self._send()

    def arrived(self) -> Counters:
        """Return the counters as of the last `advance`; waits for that, and for nothing since."""
        if self._arrival is not None:
            self._arrival.synchronize()
        scale, growth, patience, applied, skipped, failed = self._copy.tolist()
        return Counters(scale, int(growth), int(patience), int(applied), int(skipped), bool(failed))

    def _send(self) -> None:
        if self._state.device.type != "cuda":
            self._copy = self._state.cpu()
            return
        self._copy = torch.empty(self._state.shape, dtype=self._state.dtype, pin_memory=True)
        self._copy.copy_(self._state, non_blocking=True)
        arrival: Any = torch.cuda.Event  # its constructor has no types
        self._arrival = arrival()
        self._arrival.record()


def skips_by_itself(optimizer: SteppableOptimizer) -> bool:
    """Say whether its step takes ``found_inf``, as PyTorch's fused ones and `MasterWeights` do."""
    # A fused SGD keeps momenta that its first step has made and, where that was skipped, not set.
    takes = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return takes and not isinstance(optimizer, torch.optim.SGD)


def step_unless(
    optimizer: SteppableOptimizer,
    non_finite: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Step an optimizer that `skips_by_itself` where ``non_finite``, 0-d and 0 or 1, is zero."""
    told: Any = optimizer
    told.grad_scale, told.found_inf = None, non_finite
    try:
        optimizer.step(*args, **kwargs)
    finally:
        del told.grad_scale, told.found_inf


def _rounded(value: torch.Tensor) -> torch.Tensor:
    return value.float().double()
