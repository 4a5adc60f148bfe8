"""The product of a head with some of the tokens, and the gradients that they add to."""

# Shapes: T tokens, D model, V vocabulary; a shard keeps its letters.

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

# With what else a chunk needs, a ninth of the logits stays below an eighth of their bytes. Fewer
# tokens than the least make slow products, and their logits are few.
_PARTS = 9
_FEWEST_TOKENS = 64


@attrs.frozen(eq=False)
class Head:
    """A rank's part of the product of all tokens with a head, computed chunk by chunk.

    Args:
        hidden_TD: The tokens.
        weight_VD: This rank's rows, padding included.
        bias_V: This rank's part, padding included, or None.
        count: How many of the rows are not padding; the others are left out of the product.
        chunk_tokens: How many tokens make a chunk; None: about a ninth of them, at least 64.
    """

    hidden_TD: torch.Tensor
    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None
    count: int
    chunk_tokens: int | None

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the rows of each chunk and its logits, which are overwritten by the next."""
        tokens = len(self.hidden_TD)
        step = self.chunk_tokens or max(_FEWEST_TOKENS, -(-tokens // (8 * _PARTS)) * 8)
        space_TV = self.hidden_TD.new_empty(min(step, tokens), self.count)
        weight_DV = self.weight_VD[: self.count].t()
        for start in range(0, tokens, step):
            rows = slice(start, min(start + step, tokens))
            logits_TV = space_TV[: rows.stop - start]
            if self.bias_V is None:
                torch.mm(self.hidden_TD[rows], weight_DV, out=logits_TV)
            else:
                bias_V = self.bias_V[: self.count]
                torch.addmm(bias_V, self.hidden_TD[rows], weight_DV, out=logits_TV)
            yield rows, logits_TV


class HeadGradients:
    """The gradients of a head's tokens, weight and bias, of which each chunk adds its terms.

    Those of the weight and bias are summed in at least float32 and rounded once.

    Args:
        head: The product.
        wanted: Which of the three are wanted.
    """

    def __init__(self, head: Head, wanted: tuple[bool, bool, bool]) -> None:
        self._head = head
        hidden_TD, weight_VD = head.hidden_TD, head.weight_VD
        dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        self._hidden_TD = torch.empty_like(hidden_TD) if wanted[0] else None
        self._weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if wanted[1] else None
        self._bias_V = weight_VD.new_zeros(len(weight_VD), dtype=dtype) if wanted[2] else None

    def add(self, rows: slice, gradient_TV: torch.Tensor) -> None:
        """Add the terms of a chunk, given the gradient of its logits."""
        head = self._head
        if self._hidden_TD is not None:
            torch.mm(gradient_TV, head.weight_VD[: head.count], out=self._hidden_TD[rows])
        if self._weight_VD is not None:
            total_VD = self._weight_VD[: head.count]
            if total_VD.dtype == gradient_TV.dtype:
                total_VD.addmm_(gradient_TV.t(), head.hidden_TD[rows])
            else:
                total_VD.add_(gradient_TV.t() @ head.hidden_TD[rows])
        if self._bias_V is not None:
            self._bias_V[: head.count] += gradient_TV.sum(0, dtype=self._bias_V.dtype)

    def times(self, factor: torch.Tensor | None = None) -> tuple[torch.Tensor | None, ...]:
        """Return all three, times a number, in the dtypes of what they are gradients of.

        They are multiplied where they are, so this can be asked for once.
        """
        found = (self._hidden_TD, self._weight_VD, self._bias_V)
        if factor is not None:
            for gradient in found:
                if gradient is not None:
                    gradient.mul_(factor)
        dtype = self._head.weight_VD.dtype
        return tuple(None if gradient is None else gradient.to(dtype) for gradient in found)
