"""Cross-entropy over logits whose vocabulary is cut over the tensor-parallel ranks."""

# Shapes: T tokens, V vocabulary; a shard keeps its letters. Logits are at least float32 inside.

from __future__ import annotations

from typing import Any

import torch

from trainwright.collectives import Communicator
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.head_loss import HeadLoss
from trainwright.sharding.tensor.loss_terms import LossTerms, gather_sums


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    tp: Communicator,
    *,
    cut: Cut | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Return -log softmax(logits)[label] of each token; the caller sums.

    Only the logits themselves and a few numbers a token are kept for the backward, which computes
    the probabilities again, block by block; there is never a float32 copy of all logits. Where
    even the logits are too many, `linear_cross_entropy` computes them a chunk at a time.

    Args:
        logits: ``[..., V/tp]``, this rank's part of the vocabulary, any floating-point dtype.
        labels: Integers ``[...]`` over the whole vocabulary, the same on every rank.
        tp: The tensor-parallel ranks, in the order of their parts.
        cut: As in `HeadLoss`.
        vocab_size: As in `HeadLoss`.
        ignore_index: As in `HeadLoss`.
        label_smoothing: As in `HeadLoss`.
        z_loss: As in `HeadLoss`.

    Returns:
        Losses ``[...]``, equal on all ranks, in the dtype of the logits but at least float32.

    Raises:
        ShardingError: The shapes, the cut and the sizes do not fit, a number is out of range,
            labels are not integers or, on the host, one is out of range; on an accelerator that
            stops at an assertion of the device.

    Communicates:
        Forward one all-gather of three numbers a token, four with label smoothing; backward
        nothing. None at size 1.
    """
    if logits.ndim != labels.ndim + 1 or logits.shape[:-1] != labels.shape:
        raise ShardingError(
            f"logits [..., V/tp] and labels [...] must agree in [...], got "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    if not logits.is_floating_point():
        raise ShardingError(f"logits must be floating-point, got {logits.dtype}")
    loss = HeadLoss(cut, vocab_size, ignore_index, label_smoothing, z_loss)
    indices = loss.indices(logits.shape[-1], tp)
    loss.check_labels(labels, indices.size)
    logits_TV = logits.reshape(labels.numel(), logits.shape[-1])
    terms = LossTerms.of(loss, indices, labels.reshape(-1))
    losses_T: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_TV, terms, tp
    )
    return losses_T.view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """The function with its own backward; the gradient of a replicated loss is replicated."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, terms: LossTerms, tp: Communicator
    ) -> torch.Tensor:
        sums_KT = terms.sums(logits_TV[:, : terms.indices.count])
        losses_T, totals_2T = terms.losses(gather_sums(sums_KT, tp))
        ctx.save_for_backward(logits_TV, totals_2T)
        ctx.terms = terms
        return losses_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_TV, totals_2T = ctx.saved_tensors
        terms: LossTerms = ctx.terms
        count = terms.indices.count
        result_TV = torch.empty_like(logits_TV)
        result_TV[:, count:] = 0.0
        gradient = terms.gradient(grad_T, totals_2T)
        terms.write(gradient, logits_TV[:, :count], result_TV[:, :count])
        return result_TV, None, None
