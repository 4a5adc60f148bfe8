"""Attention shared along the sequence equals the plain attention of one process."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld
from trainwright.sharding.context import ContextLayout, Documents, ring_attention


def visible(length, batch, causal, ids):
    """The definition of what sees what: [B, 1, S, S]."""
    seen = torch.ones(batch, 1, length, length, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if ids is not None:
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
        seen = seen & (ids >= 0)[:, None, None, :]
    return seen


def plain_attention(q, k, v, causal, ids):
    """The textbook, with all scores at once."""
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT / q.shape[-1] ** 0.5
    seen = visible(q.shape[2], q.shape[0], causal, ids)
    weights = torch.where(seen, (scores - scores.detach().amax(-1, keepdim=True)).exp(), 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return weights @ v.repeat_interleave(groups, 1)


@st.composite
def problems(draw):
    """Draw sizes, documents (with padding, in several runs, leaving blocks empty) and tensors."""
    batch, kv_heads, groups = (draw(st.integers(1, 3)) for _ in range(3))
    length, size = draw(st.integers(1, 40)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def normal(heads):
        shape = (batch, heads, length, size)
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    kind = draw(st.sampled_from(["none", "packed", "any"]))
    ids = torch.randint(-1, 3, (batch, length), generator=generator)
    if kind == "packed":
        ids = (ids == 0).cumsum(1) - 1
    heads = kv_heads * groups
    tensors = (normal(heads), normal(kv_heads), normal(kv_heads))
    return tensors, normal(heads), None if kind == "none" else ids, draw(st.booleans())


def attend_in_parts(comm, share, tensors, upstream, layout):
    """Run a function of this rank's parts; return its output and the gradients of the parts."""
    parts = [layout.split(whole, 2, comm.rank).clone().requires_grad_() for whole in tensors]
    out = share(*parts, layout=layout, comm=comm)
    grads = torch.autograd.grad(out, parts, layout.split(upstream, 2, comm.rank))
    return [out.detach(), *grads]


@given(problem=problems(), ranks=st.integers(1, 8), kind=st.sampled_from(["zigzag", "contiguous"]))
@settings(max_examples=15)
def test_ring_attention_is_the_attention_of_one_process(problem, ranks, kind):
    tensors, upstream, ids, causal = problem
    layout = ContextLayout(kind, tensors[0].shape[2], ranks)
    whole = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = plain_attention(*whole, causal, ids)
    wanted = [expected, *torch.autograd.grad(expected, whole, upstream)]

    def share(q, k, v, layout, comm):
        known = None if ids is None else Documents.of(ids)
        return ring_attention(q, k, v, layout=layout, comm=comm, documents=known, causal=causal)

    parts = LocalWorld(ranks).run(attend_in_parts, share, tensors, upstream, layout)

    for found, want in zip(zip(*parts, strict=True), wanted, strict=True):
        # Sums of at most 40 terms of size 10 in float64.
        torch.testing.assert_close(layout.join(found, 2), want, atol=1e-12, rtol=1e-12)
