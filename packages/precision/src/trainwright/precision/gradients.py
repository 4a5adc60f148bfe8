"""Reading, dividing and checking the gradients that an optimizer is about to use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainwright.precision.errors import PrecisionError
from trainwright.precision.protocol import SteppableOptimizer


def named_gradients(
    optimizer: SteppableOptimizer, names: Mapping[torch.Tensor, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, gradient values) of every parameter with a gradient, in the optimizer's order.

    A name comes from ``names``, else from the group's "param_names", else from its place. Of a
    sparse gradient the stored values are yielded, of a DTensor this rank's part.
    """
    for number, group in enumerate(optimizer.param_groups):
        group_names = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is None:
                continue
            if parameter in names:
                name = names[parameter]
            elif group_names:
                name = group_names[index]
            else:
                shape = tuple(parameter.shape)
                name = f"parameter {index} of group {number}, shape {shape}"
            yield name, local_values(f"the gradient of {name}", parameter.grad)


def unscale_gradients_(
    optimizer: SteppableOptimizer,
    scale: float | torch.Tensor,
    *,
    check: bool,
    allow_float16: bool = False,
) -> list[torch.Tensor]:
    """Divide the gradients by ``scale`` in place; make no host synchronisation.

    Args:
        optimizer: owner of the gradients.
        scale: what they were multiplied by; a tensor where the host does not know it.
        check: whether to look for non-finite values in the same pass.
        allow_float16: whether float16 gradients may pass; dividing would flush them to zero.

    Returns:
        One float32 0-d flag a device, 1.0 where a gradient was not finite; empty without
        gradients or without ``check``.

    Raises:
        PrecisionError: a gradient is float16, or a DTensor that is not summed yet.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for name, gradient in named_gradients(optimizer, {}):
        if gradient.dtype == torch.float16 and not allow_float16:
            raise PrecisionError(
                f"the gradient of {name} is float16: unscaled there, small values become zero; "
                "wrap the optimizer in MasterWeights, or keep float32 parameters"
            )
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    known = isinstance(scale, float)
    inverse = 1.0 / scale if known else torch.as_tensor(scale).double().reciprocal()
    flags: dict[torch.device, torch.Tensor] = {}
    for (device, _), gradients in kinds.items():
        if check:
            flag = flags.setdefault(device, torch.zeros((), device=device))
            factor = torch.as_tensor(inverse, dtype=torch.float32, device=device)
            # The fused kernel of torch.amp: one pass divides and notes what is not finite.
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, factor)
        elif not known:
            torch._foreach_mul_(gradients, torch.as_tensor(inverse, device=device))
        elif scale != 1.0:
            torch._foreach_mul_(gradients, inverse)
    return list(flags.values())


def first_non_finite(
    optimizer: SteppableOptimizer, names: Mapping[torch.Tensor, str]
) -> str | None:
    """Return the name of the first parameter whose gradient is not finite; waits for the device."""
    for name, gradient in named_gradients(optimizer, names):
        if not bool(torch.isfinite(gradient).all()):
            return name
    return None


def refuse_lonely_decision(
    optimizer: SteppableOptimizer, names: Mapping[torch.Tensor, str]
) -> None:
    """Raise if other ranks hold parts of a gradient and nobody would ask them.

    Raises:
        PrecisionError: a gradient is a DTensor over more than one rank.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None or not _is_distributed(gradient):
                continue
            whole = all(placement.is_replicate() for placement in gradient.placements)
            if whole or gradient.device_mesh.size() < 2:
                continue
            name = names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")
            raise PrecisionError(
                f"the gradient of {name} is a DTensor over {gradient.device_mesh.size()} ranks, "
                "which must skip a step together; give the scaler communicator=, or unscale_() a "
                "non_finite= that all ranks share"
            )


def _is_distributed(gradient: torch.Tensor) -> bool:
    # Not by isinstance: importing torch.distributed.tensor takes longer than all of this package.
    return hasattr(gradient, "device_mesh") and hasattr(gradient, "to_local")


def local_values(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, without a copy; the stored values of a sparse one.

    Raises:
        PrecisionError: the tensor is a DTensor whose sum over ranks is still due.
    """
    if _is_distributed(gradient):
        distributed: Any = gradient
        if any(placement.is_partial() for placement in distributed.placements):
            raise PrecisionError(
                f"{name} is a DTensor with placements {distributed.placements}: "
                "finite parts may have an infinite sum; redistribute it to Shard or Replicate "
                "before it is unscaled"
            )
        local = distributed.detach().to_local()
        # What a collective still fills is waited for, in place of its wrapper.
        gradient = local.wait() if hasattr(local, "wait") else local
    return gradient._values() if gradient.is_sparse else gradient
