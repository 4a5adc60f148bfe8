"""What attention is, for tests of ways to share it: the textbook, and problems to try it on."""

# Shapes: B batch, H query heads, K key/value heads, S positions of the whole sequence, E size.

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from hypothesis import strategies as st

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.context.layout import ContextLayout

Way = Callable[..., torch.Tensor]
"""Takes q, k, v and, by name, layout, comm, documents, causal; returns a rank's output."""


@attrs.frozen(eq=False)
class AttentionProblem:
    """Tensors of whole sequences and what sees what.

    Args:
        inputs: q [B, H, S, E], k and v [B, K, S, E].
        upstream: The gradient of the output.
        documents: Numbers [B, S], negative for padding; None: one document.
        causal: Whether a position sees none after itself.
    """

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    upstream: torch.Tensor
    documents: torch.Tensor | None
    causal: bool

    @property
    def length(self) -> int:
        """Positions of the whole sequence."""
        return self.inputs[0].shape[2]

    def visible(self) -> torch.Tensor:
        """Return which query sees which key: bool [B, 1, S, S]."""
        seen = torch.ones(self.length, self.length, dtype=torch.bool)
        seen = seen.tril() if self.causal else seen
        if self.documents is None:
            return seen.expand(self.inputs[0].shape[0], 1, -1, -1)
        ids = self.documents
        alike = ids[:, None, :, None] == ids[:, None, None, :]
        return seen & alike & (ids >= 0)[:, None, None, :]

    def expected(self) -> list[torch.Tensor]:
        """Return output and gradients of q, k and v in float64, with all scores at once."""
        q, k, v = (tensor.double().requires_grad_() for tensor in self.inputs)
        out, _ = plain_attention(q, k, v, self.visible())
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), self.upstream.double())]

    def found(self, way: Way, layout: ContextLayout) -> list[torch.Tensor]:
        """Return the same, computed by the ranks of a layout and joined."""
        parts = LocalWorld(layout.size).run(self.on_rank, way, layout)
        return [layout.join(same, 2) for same in zip(*parts, strict=True)]

    def on_rank(self, comm: Communicator, way: Way, layout: ContextLayout) -> list[torch.Tensor]:
        """Return one rank's part of the output and of the gradients."""
        rank = comm.rank
        inputs = [layout.split(t, 2, rank).clone().requires_grad_() for t in self.inputs]
        out = way(*inputs, layout=layout, comm=comm, documents=self.documents, causal=self.causal)
        grads = torch.autograd.grad(out, inputs, layout.split(self.upstream, 2, rank))
        return [out.detach(), *grads]


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp of the textbook; 0 and -inf where no key is visible."""
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT / q.shape[-1] ** 0.5
    hidden = scores.masked_fill(~visible, -torch.inf)
    sees = visible.any(-1, keepdim=True)
    weights = torch.where(sees, hidden, 0.0).softmax(-1) * sees
    return weights @ v.repeat_interleave(groups, 1), hidden.logsumexp(-1)


@st.composite
def attention_problems(
    draw: st.DrawFn, max_length: int = 40, dtype: torch.dtype = torch.float64
) -> AttentionProblem:
    """Draw a problem; documents leave whole blocks empty, come back later, or are all padding."""
    batch, kv_heads, groups = (draw(st.integers(1, 3)) for _ in range(3))
    length, size = draw(st.integers(1, max_length)), draw(st.sampled_from([1, 3, 4, 8]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    heads = (kv_heads * groups, kv_heads, kv_heads, kv_heads * groups)
    q, k, v, upstream = (
        torch.randn((batch, count, length, size), generator=generator).to(dtype) for count in heads
    )
    kind = draw(st.sampled_from(["none", "packed", "returning", "padding"]))
    ids = torch.randint(-1, 3, (batch, length), generator=generator)
    if kind == "packed":
        ids = (ids == 0).cumsum(1) - 1
    if kind == "padding":
        ids = torch.full_like(ids, -1)
    documents = None if kind == "none" else ids
    return AttentionProblem((q, k, v), upstream, documents, draw(st.booleans()))
