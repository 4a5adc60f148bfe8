"""A head's product and cross-entropy in one, chunk by chunk of tokens: no logits of all tokens."""

# Shapes: T tokens, D model, V vocabulary; a shard keeps its letters.

from __future__ import annotations

from typing import Any

import torch

from trainwright.collectives import Communicator, differentiable
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.head_chunks import Head, HeadGradients
from trainwright.sharding.tensor.head_loss import HeadLoss
from trainwright.sharding.tensor.loss_terms import LossTerms, gather_sums

_PLAIN = HeadLoss()


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tp: Communicator,
    *,
    bias: torch.Tensor | None = None,
    loss: HeadLoss = _PLAIN,
    input_is_entered: bool = False,
) -> torch.Tensor:
    """Return the loss of each token of ``hidden @ weight.T``, of which only a chunk ever exists.

    The losses may go on into any function; since only its backward says what each token counts
    for, the product is computed a second time there. Where the losses are only summed up,
    `linear_cross_entropy_sum` does without.

    Args:
        hidden: ``[..., D]``, replicated.
        weight: ``[V/tp, D]``, this rank's part of the vocabulary.
        labels: Integers ``[...]`` over the whole vocabulary, the same on every rank.
        tp: The tensor-parallel ranks, in the order of their parts.
        bias: ``[V/tp]``.
        loss: How the loss is computed, and how many tokens at once.
        input_is_entered: Whether the gradient of ``hidden`` is summed over the ranks by whoever
            made it, as `enter_sequence` and ``differentiable.replicate_to_partial`` do. Each rank
            knows only the term of its part of the vocabulary: without such a sum the gradient is
            partial, and wrong if taken for the whole.

    Returns:
        Losses ``[...]``, equal on all ranks, in the dtype of ``hidden`` but at least float32.

    Raises:
        ShardingError: As `vocab_parallel_cross_entropy`; ``weight``, ``bias`` and ``hidden`` do not
            fit together.

    Communicates:
        Forward one all-gather of three numbers a token, four with label smoothing; backward one
        all-reduce of the gradient of ``hidden``, unless ``input_is_entered``. None at size 1.
    """
    terms = _terms(hidden, weight, labels, tp, bias, loss)
    tensors = _entered(hidden, weight, bias, None if input_is_entered else tp)
    return _losses(tensors, terms, tp).view(labels.shape)


def linear_cross_entropy_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tp: Communicator,
    *,
    bias: torch.Tensor | None = None,
    token_weights: torch.Tensor | None = None,
    loss: HeadLoss = _PLAIN,
    input_is_entered: bool = False,
) -> torch.Tensor:
    """Return the sum of the tokens' losses, each times its weight.

    The gradients are computed in the forward, chunk by chunk, from the logits that are there, and
    are kept until the backward multiplies them by that of the sum: `linear_cross_entropy` without
    its second product, for the memory of one gradient of ``weight`` meanwhile. The backward can
    run once. In float16 small gradients would be lost before the loss scale reaches them, so there
    the losses of `linear_cross_entropy` are summed.

    Args:
        hidden: As there, with the arguments that are not named here.
        weight: ``[V/tp, D]``.
        labels: Integers ``[...]``.
        tp: The tensor-parallel ranks.
        bias: ``[V/tp]``.
        token_weights: ``[...]``, the same on every rank; None: 1.
        loss: How the loss is computed, and how many tokens at once.
        input_is_entered: As there.

    Returns:
        A scalar, equal on all ranks, in the dtype of ``hidden`` but at least float32.

    Raises:
        ShardingError: As `linear_cross_entropy`; ``token_weights`` are not of the labels' shape;
            the backward runs a second time.

    Communicates:
        Forward one all-gather a chunk, in all as many numbers as `linear_cross_entropy`; backward
        the same as there. None at size 1.
    """
    if token_weights is not None and token_weights.shape != labels.shape:
        raise ShardingError(
            f"token_weights and labels must have the same shape, got {tuple(token_weights.shape)} "
            f"and {tuple(labels.shape)}"
        )
    terms = _terms(hidden, weight, labels, tp, bias, loss)
    tensors = _entered(hidden, weight, bias, None if input_is_entered else tp)
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if token_weights is None:
        weights_T = torch.ones(labels.numel(), dtype=dtype, device=hidden.device)
    else:
        weights_T = token_weights.reshape(-1).to(dtype)
    if tensors[0].dtype == torch.float16 or not torch.is_grad_enabled():
        return (_losses(tensors, terms, tp) * weights_T).sum()
    total: torch.Tensor = _Sum.apply(  # type: ignore[no-untyped-call]
        *tensors, weights_T, terms, tp
    )
    return total


_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _terms(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tp: Communicator,
    bias: torch.Tensor | None,
    loss: HeadLoss,
) -> LossTerms:
    """Check that all fit together, and look the labels up."""
    if hidden.ndim != labels.ndim + 1 or hidden.shape[:-1] != labels.shape:
        raise ShardingError(
            f"hidden [..., D] and labels [...] must agree in [...], got {tuple(hidden.shape)} and "
            f"{tuple(labels.shape)}"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ShardingError(
            f"weight must be [V/tp, D] with the D={hidden.shape[-1]} of hidden, got "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShardingError(
            f"bias must be [V/tp] like weight {tuple(weight.shape)}, got {tuple(bias.shape)}"
        )
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    if not hidden.is_floating_point() or (len(dtypes) > 1 and _autocast_dtype(hidden) is None):
        raise ShardingError(
            f"hidden, weight and bias must have one floating-point dtype, got {dtypes}"
        )
    indices = loss.indices(len(weight), tp)
    loss.check_labels(labels, indices.size)
    return LossTerms.of(loss, indices, labels.reshape(-1))


def _entered(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: Communicator | None
) -> _Tensors:
    """Return the tensors in the dtype that products have here, their gradients taken care of."""
    if tp is not None:
        hidden = differentiable.replicate_to_partial(hidden, tp)
    hidden_TD = hidden.reshape(-1, hidden.shape[-1])
    dtype = _autocast_dtype(hidden)
    if dtype is None:
        return hidden_TD, weight, bias
    return hidden_TD.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _autocast_dtype(hidden: torch.Tensor) -> torch.dtype | None:
    device = hidden.device.type
    if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _losses(tensors: _Tensors, terms: LossTerms, tp: Communicator) -> torch.Tensor:
    losses_T: torch.Tensor = _ByToken.apply(  # type: ignore[no-untyped-call]
        *tensors, terms, tp
    )
    return losses_T


class _ByToken(torch.autograd.Function):
    """All losses; the backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        terms: LossTerms,
        tp: Communicator,
    ) -> torch.Tensor:
        head = Head(hidden_TD, weight_VD, bias_V, terms.indices.count, terms.loss.chunk_tokens)
        spares = _may_overwrite(hidden_TD)
        sums = [
            terms.part(rows).sums(logits_TV, overwrite=spares) for rows, logits_TV in head.chunks()
        ]
        sums_KT = torch.cat(sums, 1) if sums else terms.sums(hidden_TD.new_empty(0, 1))
        losses_T, totals_2T = terms.losses(gather_sums(sums_KT, tp))
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, totals_2T)
        ctx.terms = terms
        return losses_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, totals_2T = ctx.saved_tensors
        terms: LossTerms = ctx.terms
        head = Head(hidden_TD, weight_VD, bias_V, terms.indices.count, terms.loss.chunk_tokens)
        gradients = HeadGradients(head, ctx.needs_input_grad[:3])
        for rows, logits_TV in head.chunks():
            part = terms.part(rows)
            gradient = part.gradient(grad_T[rows], totals_2T[:, rows])
            part.write(gradient, logits_TV, logits_TV)
            gradients.add(rows, logits_TV)
        return *gradients.times(), None, None


class _Sum(torch.autograd.Function):
    """The weighted sum; the forward computes the gradients for an upstream gradient of 1."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        weights_T: torch.Tensor,
        terms: LossTerms,
        tp: Communicator,
    ) -> torch.Tensor:
        head = Head(hidden_TD, weight_VD, bias_V, terms.indices.count, terms.loss.chunk_tokens)
        gradients = HeadGradients(head, ctx.needs_input_grad[:3])
        losses_T = torch.empty_like(weights_T)
        spares = _may_overwrite(hidden_TD)
        for rows, logits_TV in head.chunks():
            part = terms.part(rows)
            sums_KT = part.sums(logits_TV, overwrite=spares)
            losses_T[rows], totals_2T = part.losses(gather_sums(sums_KT, tp))
            gradient = part.gradient(weights_T[rows], totals_2T)
            if spares:
                part.finish_(gradient, logits_TV, sums_KT[0])
            else:
                part.write(gradient, logits_TV, logits_TV)
            gradients.add(rows, logits_TV)
        ctx.gradients = gradients
        ctx.losses_T = losses_T if ctx.needs_input_grad[3] else None
        return (losses_T * weights_T).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients: HeadGradients | None = ctx.gradients
        if gradients is None:
            raise ShardingError(
                "a second backward through linear_cross_entropy_sum, whose first has used up the "
                "gradients; call it again, or use linear_cross_entropy"
            )
        ctx.gradients = None
        of_weights_T = None if ctx.losses_T is None else ctx.losses_T * grad
        return *gradients.times(grad), of_weights_T, None, None


def _may_overwrite(hidden_TD: torch.Tensor) -> bool:
    """Whether logits of this dtype are as precise as the loss, so that it can use their place."""
    return hidden_TD.dtype == torch.promote_types(hidden_TD.dtype, torch.float32)
