"""Logits and embeddings are held back by exactly as much as is said, and by nothing else."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import LocalWorld
from trainwright.stability_guards import (
    GuardError,
    QKNorm,
    attention_logit_bound,
    largest_logits,
    qk_clip_,
    qk_clip_factors,
    qk_clip_latent_,
    shrink_gradient,
    z_loss,
    z_loss_of,
)


def drawn(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_the_z_loss_is_a_sum_over_valid_tokens_with_the_gradient_of_its_formula():
    logits = (3 * drawn(0, 2, 5, 7)).requires_grad_()
    valid = drawn(1, 2, 5) > 0

    loss = z_loss(logits, valid, 1e-2)
    loss.backward()

    log_z = logits.detach().exp().sum(-1).log()
    torch.testing.assert_close(loss, 1e-2 * log_z[valid].square().sum())
    expected = 2e-2 * log_z.unsqueeze(-1) * logits.detach().softmax(-1) * valid.unsqueeze(-1)
    torch.testing.assert_close(logits.grad, expected)
    torch.testing.assert_close(z_loss_of(log_z, valid, 1e-2), loss.detach())
    torch.testing.assert_close(z_loss(logits), 1e-4 * log_z.square().sum())


def test_tokens_that_do_not_count_add_nothing_whatever_their_logits():
    logits = torch.zeros(2, 3, dtype=torch.bfloat16)
    logits[1] = math.inf
    logits.requires_grad_()

    loss = z_loss(logits, torch.tensor([True, False]), 1.0)
    loss.backward()

    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(3) ** 2)
    assert logits.grad[1].tolist() == [0.0] * 3
    assert logits.grad.isfinite().all()


@given(seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.1, 1 / 3, 1.0]))
def test_shrinking_changes_the_gradient_and_not_a_bit_of_the_value(seed, share):
    value = drawn(seed, 3, 4).requires_grad_()

    shrunk = shrink_gradient(value, share)
    weights = drawn(seed + 1, 3, 4)
    (shrunk * weights).sum().backward()

    assert torch.equal(shrunk, value)
    assert torch.equal(value.grad, weights * share)
    published = (value * share + value.detach() * (1 - share)).detach()
    torch.testing.assert_close(shrunk.detach(), published)


def test_normed_queries_and_keys_are_rms_norms_that_bound_every_logit():
    norm = QKNorm(8)
    nn.init.uniform_(norm.q_norm.weight, 0.5, 2.0)
    q, k = 1e3 * drawn(0, 2, 4, 5, 8).float(), 1e-2 * drawn(1, 2, 2, 5, 8).float()

    normed_q, normed_k = norm(q, k)

    torch.testing.assert_close(normed_q, norm.q_norm(q))
    torch.testing.assert_close(normed_k, norm.k_norm(k))
    bound = 8**0.5 * (norm.q_norm.weight.abs() * norm.k_norm.weight.abs()).max()
    assert largest_logits(normed_q, normed_k, causal=False).max() <= bound * (1 + 1e-6)
    narrow, _ = norm(q.bfloat16(), k.bfloat16())
    assert narrow.dtype == torch.bfloat16
    # Computed in float32 and rounded once.
    assert torch.equal(narrow, norm.q_norm(q.bfloat16().float()).bfloat16())


def attention_inputs(hidden, q_weight, k_weight, queries, keys, q_bias=0.0, k_bias=0.0):
    q = (hidden @ q_weight.T + q_bias).unflatten(-1, (queries, -1)).transpose(1, 2)
    k = (hidden @ k_weight.T + k_bias).unflatten(-1, (keys, -1)).transpose(1, 2)
    return q, k


@given(
    seed=st.integers(0, 99),
    keys=st.integers(1, 3),
    group=st.integers(1, 3),
    part=st.sampled_from([0.05, 1.0, 100.0]),
)
def test_clipped_heads_have_their_logits_at_the_bound_and_others_are_untouched(
    seed, keys, group, part
):
    queries, width, size = keys * group, 4, 6
    hidden = 2 * drawn(seed, 2, 5, size)
    q_weight, k_weight = drawn(seed + 1, queries * width, size), drawn(seed + 2, keys * width, size)
    q_bias, k_bias = drawn(seed + 3, queries * width), drawn(seed + 4, keys * width)
    before = attention_inputs(hidden, q_weight, k_weight, queries, keys, q_bias, k_bias)
    largest = largest_logits(*before)
    bound = part * largest.abs().median().item()  # above it: all, some or none
    kept = q_weight.clone(), k_weight.clone()

    gamma = qk_clip_(
        q_weight, k_weight, largest, bound, num_key_heads=keys, q_bias=q_bias, k_bias=k_bias
    )

    after = attention_inputs(hidden, q_weight, k_weight, queries, keys, q_bias, k_bias)
    expected = torch.where(largest > bound, bound, largest)
    torch.testing.assert_close(largest_logits(*after), expected)
    torch.testing.assert_close(gamma, expected / largest)
    for head in range(queries):
        if largest[head] <= bound:
            rows = slice(head * width, (head + 1) * width)
            assert torch.equal(q_weight[rows], kept[0][rows])
            rows = slice(head // group * width, (head // group + 1) * width)
            assert torch.equal(k_weight[rows], kept[1][rows])
    assert (q_weight.abs() <= kept[0].abs()).all()
    if group == 1:  # as published: the square root on either side
        scale = gamma.sqrt().repeat_interleave(width).unsqueeze(1)
        torch.testing.assert_close(q_weight, kept[0] * scale)
        torch.testing.assert_close(k_weight, kept[1] * scale)


@given(seed=st.integers(0, 99), bound=st.sampled_from([0.5, 3.0, 1e6]))
def test_latent_attention_shrinks_by_gamma_without_touching_shared_keys_or_values(seed, bound):
    count, content, rotary, value, size = 3, 4, 2, 5, 6
    q_weight = drawn(seed, count * (content + rotary), size)
    kv_weight = drawn(seed + 1, count * (content + value), size)
    hidden, shared = drawn(seed + 2, 2, 5, size), drawn(seed + 3, 2, 1, 5, rotary)

    def logits():
        q = (hidden @ q_weight.T).unflatten(-1, (count, -1)).transpose(1, 2)
        kv = (hidden @ kv_weight.T).unflatten(-1, (count, -1)).transpose(1, 2)
        k = torch.cat([kv[..., :content], shared.expand(2, count, 5, rotary)], dim=-1)
        return largest_logits(q, k), kv[..., content:]

    largest, values = logits()
    gamma = qk_clip_latent_(
        q_weight, kv_weight, largest, bound, rotary_width=rotary, value_width=value
    )
    found, values_after = logits()

    torch.testing.assert_close(found, torch.where(largest > bound, bound, largest))
    torch.testing.assert_close(gamma, found / largest)
    assert torch.equal(values, values_after)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_logit_that_is_not_finite_spoils_no_weight(bad):
    weights = [torch.ones(4, 3), torch.ones(4, 3)]

    gamma = qk_clip_(*weights, torch.tensor([bad, 200.0]))

    assert gamma.tolist() == pytest.approx([1.0, 0.5])
    for weight in weights:
        assert weight[:2].tolist() == [[1.0] * 3] * 2
        assert weight[2:].flatten().tolist() == pytest.approx([0.5**0.5] * 6)


@given(
    seed=st.integers(0, 99),
    length=st.integers(1, 6),
    longer=st.integers(0, 3),
    causal=st.booleans(),
)
def test_the_largest_logits_are_those_of_all_visible_pairs(seed, length, longer, causal):
    q, k = drawn(seed, 2, 4, length, 3), drawn(seed + 1, 2, 2, length + longer, 3)

    found = largest_logits(q, k, causal=causal)

    scores = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) / 3**0.5
    if causal:
        hidden = torch.ones(length, length + longer, dtype=torch.bool).triu(1 + longer)
        scores = scores.masked_fill(hidden, -math.inf)
    torch.testing.assert_close(found, scores.amax((0, 2, 3)))
    assert found.max() <= attention_logit_bound(q, k) * (1 + 1e-12)


def test_the_largest_logits_do_not_depend_on_how_many_queries_are_taken_at_once():
    q, k = drawn(0, 1, 2, 600, 3), drawn(1, 1, 2, 600, 3)
    scores = q @ k.transpose(-1, -2)
    visible = scores.masked_fill(torch.ones(600, 600, dtype=torch.bool).triu(1), -math.inf)

    torch.testing.assert_close(largest_logits(q, k, 1.0), visible.amax((0, 2, 3)))


def test_ranks_that_share_heads_learn_the_largest_of_all_their_sequences():
    q, k = drawn(0, 3, 2, 4, 3), drawn(1, 3, 2, 4, 3)
    empty = q[:0], k[:0]

    def run(communicator):
        part = slice(communicator.rank, communicator.rank + 1)
        mine = (q[part], k[part]) if communicator.rank < 3 else empty
        return largest_logits(*mine, communicator=communicator)

    for found in LocalWorld(4).run(run):
        torch.testing.assert_close(found, largest_logits(q, k))
    assert largest_logits(*empty).tolist() == [-math.inf] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_clipped_in_float32_and_rounded_once(dtype):
    weight = drawn(0, 4, 3).to(dtype)
    expected = (weight.float() * (100.0 / 300.0) ** 0.5).to(dtype)
    other = weight.clone()

    qk_clip_(weight, other, torch.tensor([300.0]))

    assert torch.equal(weight, expected)
    assert torch.equal(other, expected)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: z_loss(torch.ones(2, 3), coefficient=-1.0), "coefficient must be from 0"),
        (lambda: z_loss(torch.ones(2, 3), torch.ones(3) > 0), r"bool of shape \(2,\), got"),
        (lambda: z_loss(torch.ones(2, 3), torch.ones(2)), "valid must be bool"),
        (lambda: shrink_gradient(torch.ones(1), 1.5), "share must be from 0 to 1"),
        (lambda: QKNorm(4)(torch.ones(1, 3), torch.ones(1, 4)), r"of width 4, got \(1, 3\)"),
        (lambda: qk_clip_factors(torch.ones(4), 3), "4 query heads cannot share 3 key heads"),
        (lambda: qk_clip_factors(torch.ones(4), 4, 0.0), "bound must be positive"),
        (
            lambda: qk_clip_(torch.ones(5, 2), torch.ones(4, 2), torch.ones(2)),
            r"q_weight of shape \(5, 2\) does not hold 2 heads",
        ),
        (
            lambda: largest_logits(torch.ones(1, 3, 2, 4), torch.ones(1, 2, 2, 4)),
            "cannot share 2 key heads",
        ),
        (
            lambda: qk_clip_latent_(
                torch.ones(6, 2), torch.ones(8, 2), torch.ones(2), rotary_width=1, value_width=1
            ),
            "queries have 2 content rows a head, keys 3",
        ),
        (
            lambda: qk_clip_latent_(
                torch.ones(6, 2), torch.ones(8, 2), torch.ones(2), rotary_width=3, value_width=1
            ),
            "3 of the 3 rows of a head of q_weight",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_weight_changes(make, words):
    with pytest.raises(GuardError, match=words):
        make()
