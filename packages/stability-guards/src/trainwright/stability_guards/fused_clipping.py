"""Clipping inside a fused optimizer, which reads every gradient anyway."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from trainwright.stability_guards.clipping import clip_coefficient
from trainwright.stability_guards.errors import GuardError


@contextlib.contextmanager
def clipping_in_step(
    optimizer: torch.optim.Optimizer, norm: torch.Tensor, max_norm: float
) -> Iterator[torch.Tensor]:
    """Let the optimizer's step inside of this context scale gradients as `clip_` would before it.

    This saves a pass over all gradients: PyTorch's fused optimizers divide them by their
    ``grad_scale`` while they read them. Results differ from `clip_` by float32 rounding.

    Args:
        optimizer: Every parameter group has ``fused=True``; float32 or 16-bit parameters.
        norm: global norm of the gradients, 0-d.
        max_norm: the bound; ``math.inf`` for none.

    Yields:
        0-d bool tensor: True where the norm is not finite, nothing would be scaled and the step
        must be skipped. The host does not wait.

    Raises:
        GuardError: ``max_norm`` is not positive, the optimizer is not fused or has a ``grad_scale``
            already, or a parameter is float64, for which the factor would be too coarse.
    """
    for group in optimizer.param_groups:
        if not group.get("fused"):
            raise GuardError(
                f"{type(optimizer).__name__} is not fused, so nobody would scale the gradients; "
                "build it with fused=True, or call clip_ before the step"
            )
        if any(parameter.dtype == torch.float64 for parameter in group["params"]):
            raise GuardError(
                "fused optimizers scale by a float32 factor, too coarse for float64 parameters; "
                "call clip_ before the step"
            )
    if getattr(optimizer, "grad_scale", None) is not None:
        raise GuardError(
            "the optimizer has a grad_scale already, as a GradScaler sets it; unscale first"
        )
    scale = clip_coefficient(norm, max_norm).reciprocal().to(torch.float32)
    optimizer.grad_scale = scale  # type: ignore[attr-defined]
    try:
        yield ~torch.isfinite(norm)
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
