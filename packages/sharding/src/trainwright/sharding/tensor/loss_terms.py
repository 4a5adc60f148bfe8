"""What a rank adds to the loss of a token, and the gradient of the logits it holds."""

# Shapes: R ranks, K terms of the loss, T tokens, V vocabulary; a shard keeps its letters.

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.sharding.tensor.head_loss import HeadLoss
from trainwright.sharding.tensor.local_indices import LocalIndices

# A block of rows is read, subtracted, exponentiated and summed while it is in the cache of a
# processor; an accelerator wants fewer and larger ones.
_BLOCK_ON_HOST = 1 << 18
_BLOCK_ELSEWHERE = 1 << 24


@attrs.frozen(eq=False)
class Gradient:
    """What turns logits into the loss's gradient, by token.

    The gradient of a logit is scale * exp(logit - maximum) + shift, and target more at the label;
    where a token is ignored it is 0, whatever the logit.
    """

    maximum_T1: torch.Tensor
    scale_T1: torch.Tensor
    target_T1: torch.Tensor
    shift_T1: torch.Tensor | None


@attrs.frozen(eq=False)
class LossTerms:
    """The loss of tokens whose logits are cut over the ranks.

    Args:
        loss: How it is computed.
        indices: What this rank holds of the vocabulary.
        ignored_T: Whether a token counts for nothing.
        place_T: Where its label lies on this rank, 0 if it does not.
        here_T: Whether it does, and the token is not ignored.
    """

    loss: HeadLoss
    indices: LocalIndices
    ignored_T: torch.Tensor
    place_T: torch.Tensor
    here_T: torch.Tensor

    @classmethod
    def of(cls, loss: HeadLoss, indices: LocalIndices, labels_T: torch.Tensor) -> LossTerms:
        """Look the labels, over the whole vocabulary, up."""
        ignored_T = labels_T == loss.ignore_index
        place_T, here_T = indices.find_or_refuse(labels_T)
        place_T.masked_fill_(ignored_T, 0)
        here_T.logical_and_(~ignored_T)
        return cls(loss, indices, ignored_T, place_T, here_T)

    def part(self, rows: slice) -> LossTerms:
        """Return the terms of some of the tokens."""
        tensors = (self.ignored_T, self.place_T, self.here_T)
        return LossTerms(self.loss, self.indices, *(tensor[rows] for tensor in tensors))

    def sums(self, logits_TV: torch.Tensor, *, overwrite: bool = False) -> torch.Tensor:
        """Return this rank's ``[K, T]``: largest logit, sum of exp(logit - largest), label's logit.

        With label smoothing a fourth: the sum of logit - largest.

        Args:
            logits_TV: Of the words that this rank holds, without padding.
            overwrite: Put exp(logit - largest) in the place of the logits, whose dtype must be at
                least float32.
        """
        smooths = self.loss.label_smoothing > 0.0
        dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        sums_KT = logits_TV.new_zeros((4 if smooths else 3, len(logits_TV)), dtype=dtype)
        maximum_T, sum_T, target_T = sums_KT[:3].unbind(0)
        if logits_TV.shape[1] == 0:
            maximum_T.fill_(-torch.inf)
            return sums_KT
        target_T.copy_(logits_TV.gather(1, self.place_T.unsqueeze(1)).squeeze(1))
        target_T.masked_fill_(~self.here_T, 0.0)
        for rows in blocks(logits_TV):
            block_TV = logits_TV[rows]
            maximum_T[rows] = block_TV.amax(1)
            work_TV = block_TV if overwrite else _like(block_TV, dtype)
            torch.sub(block_TV, _finite(maximum_T[rows].unsqueeze(1)), out=work_TV)
            if smooths:
                torch.sum(work_TV, 1, out=sums_KT[3, rows])
            torch.sum(_exponentiate_(work_TV), 1, out=sum_T[rows])
        return sums_KT

    def losses(self, sums_RKT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses and, as ``[2, T]``, the largest logit and the sum of exponentials."""
        maxima_RT, sums_RT, targets_RT = sums_RKT[:, :3].unbind(1)
        maximum_T = maxima_RT.amax(0)
        below_RT = maxima_RT - maximum_T
        sum_T = (sums_RT * below_RT.exp()).sum(0)
        log_T = sum_T.log()
        share = self.loss.label_smoothing
        losses_T = maximum_T - targets_RT.sum(0)
        if share > 0.0:
            below_T = sums_RKT[:, 3].sum(0)
            for below, count in zip(below_RT, self.indices.counts, strict=True):
                # A rank without words has no largest logit: 0 * -inf would not be 0.
                if count > 0:
                    below_T.add_(below, alpha=count)
            losses_T = (1.0 - share) * losses_T - (share / self.indices.size) * below_T
        losses_T += log_T
        if self.loss.z_loss > 0.0:
            losses_T += self.loss.z_loss * (maximum_T + log_T).square()
        return losses_T.masked_fill_(self.ignored_T, 0.0), torch.stack((maximum_T, sum_T))

    def gradient(self, grad_T: torch.Tensor, totals_2T: torch.Tensor) -> Gradient:
        """Return what the gradient of the logits is made of, given that of the losses."""
        maximum_T, sum_T = totals_2T.unbind(0)
        share = self.loss.label_smoothing
        grad_T = grad_T.masked_fill(self.ignored_T, 0.0)
        scale_T = grad_T / sum_T
        if self.loss.z_loss > 0.0:
            scale_T *= 1.0 + 2.0 * self.loss.z_loss * (maximum_T + sum_T.log())
        scale_T.masked_fill_(self.ignored_T, 0.0)
        target_T = torch.where(self.here_T, (share - 1.0) * grad_T, 0.0)
        shift_T1 = (grad_T * (-share / self.indices.size)).unsqueeze(1) if share > 0.0 else None
        return Gradient(
            maximum_T.unsqueeze(1), scale_T.unsqueeze(1), target_T.unsqueeze(1), shift_T1
        )

    def write(self, gradient: Gradient, logits_TV: torch.Tensor, result_TV: torch.Tensor) -> None:
        """Write the gradient of logits, which may lie in the same place, block by block."""
        dtype = gradient.scale_T1.dtype
        for rows in blocks(logits_TV):
            block_TV = result_TV[rows]
            work_TV = block_TV if block_TV.dtype == dtype else _like(block_TV, dtype)
            torch.sub(logits_TV[rows], gradient.maximum_T1[rows], out=work_TV)
            self._finish_(gradient, rows, _exponentiate_(work_TV), gradient.scale_T1[rows])
            if work_TV is not block_TV:
                block_TV.copy_(work_TV)

    def finish_(
        self, gradient: Gradient, exponentials_TV: torch.Tensor, largest_T: torch.Tensor
    ) -> None:
        """Turn exponentials that `sums` left under this rank's largest logits into the gradient."""
        finite_T1 = _finite(largest_T.unsqueeze(1))
        scale_T1 = gradient.scale_T1 * (finite_T1 - gradient.maximum_T1).exp()
        for rows in blocks(exponentials_TV):
            self._finish_(gradient, rows, exponentials_TV[rows], scale_T1[rows])

    def _finish_(
        self, gradient: Gradient, rows: slice, block_TV: torch.Tensor, scale_T1: torch.Tensor
    ) -> None:
        block_TV.mul_(scale_T1)
        if gradient.shift_T1 is not None:
            block_TV.add_(gradient.shift_T1[rows])
        ignored_T = self.ignored_T[rows]
        # Zero times an exponential that is not finite would not be zero. Where looking costs
        # nothing, blocks without such tokens are spared the pass.
        if block_TV.device.type != "cpu" or bool(ignored_T.any()):
            block_TV.masked_fill_(ignored_T.unsqueeze(1), 0.0)
        block_TV.scatter_add_(1, self.place_T[rows].unsqueeze(1), gradient.target_T1[rows])


def gather_sums(sums_KT: torch.Tensor, tp: Communicator) -> torch.Tensor:
    """Return ``[R, K, T]``, the sums of every rank.

    Communicates:
        One all-gather; none at size 1 or without tokens.
    """
    if tp.size == 1 or sums_KT.shape[1] == 0:
        return sums_KT.unsqueeze(0)
    terms, tokens = sums_KT.shape
    gathered = sums_KT.new_empty(tp.size * terms, tokens)
    tp.all_gather(gathered, sums_KT).wait()
    return gathered.view(tp.size, terms, tokens)


def blocks(logits_TV: torch.Tensor) -> Iterator[slice]:
    """Yield ranges of rows that are worked on at once; together they are all rows."""
    rows, columns = logits_TV.shape
    at_once = _BLOCK_ON_HOST if logits_TV.device.type == "cpu" else _BLOCK_ELSEWHERE
    step = max(1, at_once // max(1, columns))
    for start in range(0, rows if columns else 0, step):
        yield slice(start, min(start + step, rows))


def _like(block_TV: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(block_TV.shape, dtype=dtype, device=block_TV.device)


def _finite(largest: torch.Tensor) -> torch.Tensor:
    """Return 0 for -inf: a part of a vocabulary masked with -inf adds nothing instead of NaN."""
    return largest.masked_fill(largest == -torch.inf, 0.0)


def _exponentiate_(work_TV: torch.Tensor) -> torch.Tensor:
    """Raise e to each element, in place."""
    if work_TV.dtype != torch.float32 or work_TV.device.type != "cpu":
        return work_TV.exp_()
    # On processors this takes three quarters of the time, multiplication included.
    return work_TV.mul_(1.0 / math.log(2.0)).exp2_()
