"""Numbers about a model that guards watch: 0-d tensors, without a wait of the host."""

# Shapes: B batch, H heads, S sequence, E width of a head.

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.stability_guards.errors import GuardError


@torch.no_grad()
def update_ratio(
    before: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
    communicator: Communicator | None = None,
) -> torch.Tensor:
    """Return the largest ratio of a tensor's update to its weight, |after - before| / |before|.

    A healthy ratio is about 1e-3; 1e-1 says that a tensor is being rewritten. Measure it every so
    many steps: it needs a copy of the weights before the update. A tensor that was all zero has no
    ratio and is left out.

    Args:
        before: copies of this rank's weights before the update.
        after: the same weights after it, in the same order.
        communicator: ranks over which each tensor is cut; None where tensors are whole.

    Returns:
        0-d float32, the same on every rank of the communicator; 0 without tensors, NaN where a
        weight or an update is.

    Raises:
        GuardError: lengths or shapes differ.

    Communicates:
        One SUM all-reduce of 8 bytes a tensor.
    """
    if [t.shape for t in before] != [t.shape for t in after]:
        raise GuardError(
            f"before and after must hold the same shapes, got {len(before)} and {len(after)} "
            "tensors; pass copies of the very weights, in one order"
        )
    if not before:
        return torch.zeros(())
    changes = torch._foreach_sub(list(after), list(before))
    norms = [torch._foreach_norm(changes), torch._foreach_norm(list(before))]
    device = before[0].device
    squares = torch.stack(
        [torch.stack([n.to(device, torch.float32) for n in each]) for each in norms]
    ).square()
    if communicator is not None:
        communicator.all_reduce(squares, ReduceOp.SUM).wait()
    change, weight = squares.sqrt()
    return torch.where(weight == 0, 0.0, change / weight).amax()


@torch.no_grad()
def largest_logit(logits: torch.Tensor, communicator: Communicator | None = None) -> torch.Tensor:
    """Return the largest absolute logit, over the ranks of ``communicator`` where one is given.

    Returns:
        0-d, at least float32; 0 without logits, NaN where one is (on one rank alone).

    Communicates:
        One MAX all-reduce of one number.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    if logits.numel():
        largest = logits.detach().abs().amax().to(wide)
    else:
        largest = torch.zeros((), dtype=wide, device=logits.device)
    if communicator is not None:
        communicator.all_reduce(largest, ReduceOp.MAX).wait()
    return largest


@torch.no_grad()
def attention_logit_bound(
    q_BHSE: torch.Tensor, k_BHSE: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Return what no attention logit of any head exceeds, without the product over all pairs.

    It is the largest query norm times the largest key norm of the same sequence and head, times
    the scale (Cauchy-Schwarz), in linear time.

    Args:
        q_BHSE: queries [B, H, S, E].
        k_BHSE: keys [B, K, S, E], K a divisor of H: query heads share keys in order.
        scale: 1/sqrt(E) by default.

    Returns:
        0-d float32 or wider.

    Raises:
        GuardError: shapes do not fit.
    """
    heads, keys = q_BHSE.shape[1], k_BHSE.shape[1]
    if keys == 0 or heads % keys or q_BHSE.shape[-1] != k_BHSE.shape[-1]:
        raise GuardError(
            f"{heads} query heads of width {q_BHSE.shape[-1]} cannot share {keys} key heads of "
            f"width {k_BHSE.shape[-1]}"
        )
    wide = torch.promote_types(q_BHSE.dtype, torch.float32)
    q_BH = torch.linalg.vector_norm(q_BHSE, dim=-1, dtype=wide).amax(-1)
    k_BK = torch.linalg.vector_norm(k_BHSE, dim=-1, dtype=wide).amax(-1)
    k_BH = k_BK.repeat_interleave(heads // keys, dim=1)
    factor = q_BHSE.shape[-1] ** -0.5 if scale is None else scale
    bound: torch.Tensor = (q_BH * k_BH).amax() * factor
    return bound
