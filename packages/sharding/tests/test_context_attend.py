"""Attention by spans: what kernels say of blocks, put together."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from trainwright.collectives import LocalWorld
from trainwright.sharding import ShardingError
from trainwright.sharding.context import (
    ChunkedKernel,
    ContextLayout,
    CpuFlashKernel,
    CudaFlashKernel,
    Documents,
    Span,
    attend,
    choose_kernel,
    ring_attention,
    spans_between,
)
from trainwright.sharding.context.testing import attention_problems, plain_attention


@given(
    problem=attention_problems(max_length=24),
    kernel=st.sampled_from([None, ChunkedKernel(), ChunkedKernel(chunk=3)]),
    cut=st.integers(0, 24),
)
def test_spans_of_a_block_compute_what_the_mask_does(problem, kernel, cut):
    known = None if problem.documents is None else Documents.of(problem.documents)
    whole = ((0, problem.length),)
    late = ((min(cut, problem.length), problem.length),)
    spans = spans_between(late, whole, causal=problem.causal, documents=known)
    q, k, v = (tensor.clone().requires_grad_() for tensor in problem.inputs)
    first = late[0][0]

    out, lse = attend(q[:, :, first:], k, v, spans, kernel=kernel)
    grads = torch.autograd.grad(out, (q, k, v), problem.upstream[:, :, first:])

    expected, sums = plain_attention(q, k, v, problem.visible())
    upstream = problem.upstream.clone()
    upstream[:, :, :first] = 0
    wanted = torch.autograd.grad(expected, (q, k, v), upstream)
    torch.testing.assert_close(out, expected[:, :, first:], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, sums[:, :, first:], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(grads, wanted, atol=1e-12, rtol=1e-12)


def test_a_query_that_sees_no_key_has_output_zero_and_log_sum_exp_minus_infinity():
    q, k, v = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3))

    out, lse = attend(q, k, v, [Span((2, 4), (0, 3))])
    grads = torch.autograd.grad(out.sum(), (q, k, v))

    unseen = [0, 1, 4, 5]
    assert out[:, :, unseen].eq(0).all()
    assert lse[:, :, unseen].eq(-torch.inf).all()
    assert lse[:, :, 2:4].isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[0][:, :, unseen].eq(0).all()
    assert grads[1][:, :, 3:].eq(0).all()


def test_nothing_visible_and_nothing_at_all_are_zeros():
    q, k, v = (torch.randn(2, 2, 5, 4, requires_grad=True) for _ in range(3))
    none = torch.zeros(2, 2, 0, 4, requires_grad=True)

    out, lse = attend(q, k, v, [])
    empty, _ = attend(none, k, v, [])
    alone, _ = attend(q, none, none, [])

    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    assert empty.shape == (2, 2, 0, 4)
    assert alone.eq(0).all()
    grads = torch.autograd.grad(out.sum() + empty.sum() + alone.sum(), (q, k, v, none))
    assert all(grad.eq(0).all() for grad in grads)


@pytest.mark.parametrize("layout", ["transposed", "fused", "strided", "reversed_dims", "expanded"])
def test_strides_do_not_matter(layout):
    normal = functools.partial(torch.randn, dtype=torch.float64)

    def make(heads):
        if layout == "transposed":
            return normal(2, 7, heads, 4).transpose(1, 2)
        if layout == "fused":
            return normal(2, 7, 24)[..., : heads * 4].view(2, 7, heads, 4).transpose(1, 2)
        if layout == "strided":
            return normal(2, heads, 7, 8)[..., ::2]
        if layout == "reversed_dims":
            return normal(2, heads, 4, 7).mT
        return normal(1, heads, 7, 1).expand(2, heads, 7, 4)

    leaves = [make(heads).requires_grad_() for heads in (4, 2, 2)]
    upstream = make(4)

    out, _ = attend(*leaves, [Span((0, 7), (0, 7), causal=True)])
    grads = torch.autograd.grad(out, leaves, upstream)

    plain, _ = plain_attention(*leaves, torch.ones(7, 7, dtype=torch.bool).tril())
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(grads, torch.autograd.grad(plain, leaves, upstream))


def test_the_kernel_that_is_used_is_told():
    q = torch.zeros(1, 2, 4, 8)
    wider = torch.zeros(1, 2, 4, 12)

    assert choose_kernel(q, q, q).name == "cpu_flash"
    assert choose_kernel(q, q, wider).name == "chunked"
    meta = q.to("meta")
    assert choose_kernel(meta, meta, meta).name == "chunked"


def test_the_cuda_kernel_is_called_as_pytorch_declares_it():
    # On tensors without data: shapes and arguments are checked, numbers are not.
    q = torch.empty(2, 4, 16, 8, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 24, 8, dtype=torch.bfloat16, device="meta")

    out, lse = CudaFlashKernel().forward(q, k, k, False, 0.5)
    grads = CudaFlashKernel().backward(out, (q, k, k), out, lse, False, 0.5)

    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


def test_values_of_another_size_go_round_the_ring():
    layout = ContextLayout("zigzag", 11, 3)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn((1, heads, 11, size), generator=generator, dtype=torch.float64)
        for heads, size in ((4, 3), (2, 3), (2, 5))
    )

    def run(comm):
        parts = [layout.split(tensor, 2, comm.rank) for tensor in (q, k, v)]
        return ring_attention(*parts, layout=layout, comm=comm)

    found = layout.join(LocalWorld(3).run(run), 2)

    plain, _ = plain_attention(q, k, v, torch.ones(11, 11, dtype=torch.bool).tril())
    torch.testing.assert_close(found, plain, atol=1e-13, rtol=1e-13)


def saved_bytes(length, ranks, way=ring_attention):
    """Return what one rank keeps for the backward."""
    layout = ContextLayout("zigzag", length, ranks)

    def run(comm):
        kept = {}

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        q, k, v = (
            torch.zeros(1, 2, layout.sizes[comm.rank], 8, requires_grad=True) for _ in range(3)
        )
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = way(q, k, v, layout=layout, comm=comm)
        out.sum().backward()
        return sum(kept.values())

    return max(LocalWorld(ranks).run(run))


def test_what_is_kept_grows_with_a_ranks_part_of_the_sequence():
    # q, k, v and out of 2 heads of 8 numbers, and a log-sum-exp a head.
    position = 2 * (4 * 8 + 1) * 4

    assert saved_bytes(256, 1) == 256 * position
    assert saved_bytes(512, 1) == 512 * position
    assert saved_bytes(256, 4) == 64 * position


def test_no_kernel_ever_holds_all_scores():
    class Largest(TorchFunctionMode):
        numel = 0
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            self.calls += "matmul" in func.__name__
            for tensor in found if isinstance(found, (tuple, list)) else [found]:
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return found

    for kernel in (CpuFlashKernel(), ChunkedKernel(chunk=16)):
        q, k, v, upstream = (torch.zeros(1, 1, 256, 4) for _ in range(4))
        with Largest() as largest:
            out, lse = kernel.forward(q, k, v, True, 0.5)
            kernel.backward(upstream, (q, k, v), out, lse, True, 0.5)
        assert largest.numel == 256 * 4
    # The chunks are seen: two products of each in the forward, five in the backward.
    assert largest.calls == 7 * 16 * 17 // 2


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 5, 8)), "one number of heads and of positions"),
        (((1, 2, 4, 8), (1, 2, 4, 4), (1, 2, 4, 4)), "one size of a head"),
        (((1, 3, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)), "multiple of the key/value heads"),
        (((2, 4, 8), (2, 4, 8), (2, 4, 8)), r"are \[B, heads, S, E\]"),
        (((1, 2, 2, 8), (1, 2, 4, 8), (1, 2, 4, 8)), "leaves the 2 queries"),
    ],
)
def test_tensors_and_spans_that_do_not_fit_are_refused(shapes, match):
    q, k, v = (torch.zeros(shape) for shape in shapes)

    with pytest.raises(ShardingError, match=match):
        attend(q, k, v, [Span((0, 3), (0, 4))])


def test_spans_that_hold_nothing_or_are_not_square_are_refused():
    with pytest.raises(ShardingError, match="at least one index"):
        Span((0, 0), (0, 4))
    with pytest.raises(ShardingError, match="as many queries as keys"):
        Span((0, 3), (0, 4), causal=True)
