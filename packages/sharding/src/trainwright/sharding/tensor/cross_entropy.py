"""Cross-entropy over logits whose vocabulary is cut over the tensor-parallel ranks."""

# Shapes: T tokens, V vocabulary; a shard keeps its letters. Logits are at least float32 inside.

from __future__ import annotations

from typing import Any

import torch

from trainwright.collectives import Communicator
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.checks import check_indices

# A chunk of rows is read, subtracted, exponentiated and summed while it is in the cache of a
# processor; an accelerator wants fewer and larger ones.
_CHUNK_ON_HOST = 1 << 18
_CHUNK_ELSEWHERE = 1 << 24


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    tp: Communicator,
    *,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return -log softmax(logits)[label] of each token; the caller sums.

    Only the logits themselves and three numbers a token are kept for the backward, which computes
    the probabilities again, chunk by chunk; there is never a float32 copy of all logits.

    Args:
        logits: ``[..., V/tp]``, this rank's part of the vocabulary, any floating-point dtype.
        labels: Integers ``[...]`` over the whole vocabulary, the same on every rank.
        tp: The tensor-parallel ranks, in the order of their parts.
        ignore_index: Tokens with this label have loss 0 and gradient 0, whatever their logits.

    Returns:
        Losses ``[...]``, equal on all ranks, in the dtype of the logits but at least float32.

    Raises:
        ShardingError: The shapes do not fit, labels are not integers or, on the host, one is out
            of range; on an accelerator that stops at an assertion of the device.

    Communicates:
        Forward one all-gather of three numbers a token; backward nothing. None at size 1.
    """
    if logits.ndim != labels.ndim + 1 or logits.shape[:-1] != labels.shape:
        raise ShardingError(
            f"logits [..., V/tp] and labels [...] must agree in [...], got "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    if not logits.is_floating_point():
        raise ShardingError(f"logits must be floating-point, got {logits.dtype}")
    if labels.device.type == "cpu":
        check_indices(labels, logits.shape[-1] * tp.size, "label", ignore_index=ignore_index)
    logits_TV = logits.reshape(-1, logits.shape[-1])
    losses_T: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_TV, labels.reshape(-1), tp, ignore_index
    )
    return losses_T.view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """The function with its own backward; the gradient of a replicated loss is replicated."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, labels_T: torch.Tensor, tp: Communicator, ignored: int
    ) -> torch.Tensor:
        first = tp.rank * logits_TV.shape[1]
        sums_3T = _gather(_local_sums(logits_TV, labels_T, first, ignored, tp.size), tp)
        maxima_RT, sums_RT, targets_RT = sums_3T.unbind(1)
        maximum_T = maxima_RT.amax(0)
        sum_T = (sums_RT * (maxima_RT - maximum_T).exp()).sum(0)
        losses_T = sum_T.log() + (maximum_T - targets_RT.sum(0))
        ctx.save_for_backward(logits_TV, labels_T, maximum_T, sum_T)
        ctx.first = first
        ctx.ignored = ignored
        return losses_T.masked_fill_(labels_T == ignored, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits_TV, labels_T, maximum_T, sum_T = ctx.saved_tensors
        index_T, here_T = _local_labels(labels_T, ctx.first, logits_TV.shape[1], ctx.ignored)
        keep_T = labels_T != ctx.ignored
        scale_T1 = torch.where(keep_T, grad_T / sum_T, 0.0).unsqueeze(1)
        target_T1 = torch.where(here_T, -grad_T, 0.0).unsqueeze(1)
        index_T1 = index_T.unsqueeze(1)
        ignored_T1 = keep_T.logical_not_().unsqueeze(1)
        result_TV = torch.empty_like(logits_TV)
        for rows in _chunks(logits_TV):
            chunk_TV = result_TV[rows]
            if chunk_TV.dtype != maximum_T.dtype:
                chunk_TV = torch.empty_like(chunk_TV, dtype=maximum_T.dtype)
            torch.sub(logits_TV[rows], maximum_T[rows].unsqueeze(1), out=chunk_TV)
            chunk_TV.exp_().mul_(scale_T1[rows])
            # Zero times a probability that is not finite would not be zero.
            chunk_TV.masked_fill_(ignored_T1[rows], 0.0)
            chunk_TV.scatter_add_(1, index_T1[rows], target_T1[rows])
            if chunk_TV.dtype != result_TV.dtype:
                result_TV[rows] = chunk_TV
        return result_TV, None, None, None


def _local_sums(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, first: int, ignored: int, size: int
) -> torch.Tensor:
    """Return ``[3, T]``: largest logit, sum of exp(logit - largest), the label's logit or 0."""
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    index_T, here_T = _local_labels(labels_T, first, logits_TV.shape[1], ignored)
    known_T = (labels_T >= 0) & (labels_T < size * logits_TV.shape[1]) | (labels_T == ignored)
    # A label of no rank is left out of range, so that the lookup itself refuses it.
    index_T = torch.where(known_T, index_T, logits_TV.shape[1])
    sums_3T = torch.empty(3, len(labels_T), dtype=dtype, device=logits_TV.device)
    maximum_T, sum_T, target_T = sums_3T.unbind(0)
    target_T.copy_(logits_TV.gather(1, index_T.unsqueeze(1)).squeeze(1))
    target_T.masked_fill_(~here_T, 0.0)
    for rows in _chunks(logits_TV):
        chunk_TV = logits_TV[rows]
        maximum_T[rows] = chunk_TV.amax(1)
        # A part of the vocabulary that is masked with -inf adds nothing instead of NaN.
        finite_T = maximum_T[rows].masked_fill(maximum_T[rows] == -torch.inf, 0.0)
        sum_T[rows] = torch.sub(chunk_TV, finite_T.unsqueeze(1)).exp_().sum(1)
    return sums_3T


def _local_labels(
    labels_T: torch.Tensor, first: int, size: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each label's index on this rank (0 where it is not here) and whether it is here."""
    index_T = labels_T.long() - first
    here_T = (index_T >= 0) & (index_T < size) & (labels_T != ignored)
    return index_T.masked_fill(~here_T, 0), here_T


def _gather(sums_3T: torch.Tensor, tp: Communicator) -> torch.Tensor:
    """Return ``[R, 3, T]``, the sums of every rank."""
    if tp.size == 1 or sums_3T.shape[1] == 0:
        return sums_3T.unsqueeze(0)
    gathered = sums_3T.new_empty(tp.size * 3, sums_3T.shape[1])
    tp.all_gather(gathered, sums_3T).wait()
    return gathered.view(tp.size, 3, -1)


def _chunks(logits_TV: torch.Tensor) -> list[slice]:
    at_once = _CHUNK_ON_HOST if logits_TV.device.type == "cpu" else _CHUNK_ELSEWHERE
    step = max(1, at_once // max(1, logits_TV.shape[1]))
    return [slice(start, start + step) for start in range(0, logits_TV.shape[0], step)]
