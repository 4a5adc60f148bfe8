"""Clipping by value, unit by unit and by running statistics; no infinity is hidden by any."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import LocalWorld
from trainwright.stability_guards import (
    GuardError,
    ZClip,
    clip_,
    clip_grad_adaptive_,
    clip_grad_norm_,
    clip_grad_value_,
    counted_on,
    global_norm,
)

BAD = [math.inf, -math.inf, math.nan]


def parameter(gradient, weight=None):
    gradient = torch.as_tensor(gradient)
    found = nn.Parameter(torch.ones_like(gradient) if weight is None else torch.as_tensor(weight))
    found.grad = gradient.clone()
    return found


def drawn(seed, *shape, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


@given(
    seed=st.integers(0, 99),
    bound=st.sampled_from([0.1, 1.0, 3.0, math.inf]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_clipping_by_value_is_torchs_where_all_is_finite(seed, bound, dtype):
    gradients = [drawn(seed, 3, 4).to(dtype), drawn(seed, 2), torch.zeros(0)]
    ours, theirs = ([parameter(g) for g in gradients] for _ in range(2))

    largest = clip_grad_value_(ours, bound)
    nn.utils.clip_grad_value_(theirs, bound)

    assert largest == max(g.double().abs().amax() for g in gradients[:2])
    for mine, yours in zip(ours, theirs, strict=True):
        assert torch.equal(mine.grad, yours.grad)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "clip",
    [
        lambda ps, c: clip_grad_value_(ps, 0.5, communicator=c),
        lambda ps, c: clip_grad_adaptive_(ps, communicator=c),
    ],
    ids=["value", "adaptive"],
)
def test_one_ranks_bad_element_leaves_all_ranks_gradients_untouched(clip, bad):
    def run(communicator):
        mine = parameter([[bad if communicator.rank == 1 else 1.0, 7.0]])
        before = mine.grad.clone()
        found = clip([mine], communicator).item()
        return found, torch.equal(mine.grad.nan_to_num(9.0), before.nan_to_num(9.0))

    for found, untouched in LocalWorld(2).run(run):
        assert untouched
        assert math.isnan(found) if math.isnan(bad) else found == math.inf


@given(
    seed=st.integers(0, 99),
    clipping=st.sampled_from([0.01, 0.5, 100.0]),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_adaptive_clipping_bounds_each_unit_by_its_own_weights(seed, clipping, scale):
    shapes = [(3, 4), (2, 3, 2, 2), (5,), (), (4, 1), (2, 0), (0,)]
    gradients = [drawn(seed + i, *shape, scale=scale) for i, shape in enumerate(shapes)]
    weights = [drawn(seed + 50 + i, *shape) for i, shape in enumerate(shapes)]
    found = [parameter(g, w) for g, w in zip(gradients, weights, strict=True)]

    norm = clip_grad_adaptive_(found, clipping, eps=0.5)

    joined = torch.cat([gradient.flatten() for gradient in gradients])
    assert norm.item() == pytest.approx(joined.norm().item(), rel=1e-12)
    for p, gradient, weight in zip(found, gradients, weights, strict=True):
        rows = range(gradient.shape[0]) if gradient.ndim > 1 else [...]
        for row in rows:
            most = clipping * max(weight[row].norm().item(), 0.5)
            factor = min(1.0, most / max(gradient[row].norm().item(), 1e-300))
            torch.testing.assert_close(p.grad[row], gradient[row] * factor, rtol=1e-12, atol=0.0)


def test_zero_weights_can_still_begin_to_learn_under_adaptive_clipping():
    new = parameter([[3.0, 4.0]], [[0.0, 0.0]])

    clip_grad_adaptive_([new], 0.01, eps=1e-3)

    assert new.grad.norm().item() == pytest.approx(1e-5)


def test_sparse_gradients_are_clipped_by_norm_and_by_value_as_dense_ones_are():
    def tables(sparse):
        table = nn.Embedding.from_pretrained(torch.ones(4, 2), freeze=False, sparse=sparse)
        (table(torch.tensor([1, 3, 1])) * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
        return [table.weight]

    for clip in (lambda ps: clip_grad_norm_(ps, 1.0), lambda ps: clip_grad_value_(ps, 3.0)):
        dense, sparse = tables(False), tables(True)
        assert clip(sparse).item() == pytest.approx(clip(dense).item())
        torch.testing.assert_close(sparse[0].grad.to_dense(), dense[0].grad)
    with pytest.raises(GuardError, match="is sparse; make it dense"):
        clip_grad_adaptive_(tables(True))
    with pytest.raises(GuardError, match="repeats indices"):
        clip_([tables(True)[0].grad], torch.tensor(1.0), 1.0)


@given(
    seed=st.integers(0, 99),
    dp=st.integers(1, 3),
    tp=st.integers(1, 2),
    norm_type=st.sampled_from([2.0, 1.0, math.inf]),
)
def test_shards_on_several_axes_count_once_by_one_all_reduce(seed, dp, tp, norm_type):
    """One tensor per way of being cut: over both axes, one, the other, none (twice: tied)."""
    axes = {"both": (), "dp": ("tp",), "tp": ("dp",), "none": ("dp", "tp")}
    whole = {name: drawn(seed + i, 2 * dp * tp) for i, name in enumerate(axes)}
    expected = [parameter(gradient) for gradient in whole.values()]
    norm = clip_grad_norm_(expected, 0.1, norm_type)

    def clip(communicator):
        at = {"dp": communicator.rank // tp, "tp": communicator.rank % tp}
        pieces = {
            "both": whole["both"].chunk(dp * tp)[communicator.rank],
            "dp": whole["dp"].chunk(dp)[at["dp"]],
            "tp": whole["tp"].chunk(tp)[at["tp"]],
            "none": whole["none"],
        }
        mine = {name: parameter(piece) for name, piece in pieces.items()}
        replicated = {mine[name]: axes[name] for name in axes}
        found = clip_grad_norm_(
            [*mine.values(), mine["none"]],
            0.1,
            norm_type,
            communicator=communicator,
            sharded=counted_on(at, replicated.__getitem__),
        )
        return found.item(), {name: p.grad for name, p in mine.items()}

    results = LocalWorld(dp * tp).run(clip)

    for found, gradients in results:
        assert found == pytest.approx(norm.item(), rel=1e-12)
        torch.testing.assert_close(gradients["none"], expected[3].grad, rtol=1e-12, atol=0.0)
    joined = torch.cat([gradients["both"] for _, gradients in results])
    torch.testing.assert_close(joined, expected[0].grad, rtol=1e-12, atol=0.0)


def test_experts_are_distinct_and_their_squares_add_up():
    """Averaging the ranks' norms would say 3.5, counting one rank's experts only 3."""

    def clip(communicator):
        expert = parameter([3.0 + communicator.rank])
        return clip_grad_norm_([expert], 10.0, communicator=communicator).item()

    assert LocalWorld(2).run(clip) == [5.0, 5.0]


@given(
    norms=st.lists(st.one_of(st.floats(0.0, 1e6), st.sampled_from([math.inf, math.nan]))),
    warmup=st.integers(1, 4),
    ceiling=st.sampled_from([1.0, math.inf]),
)
def test_zclip_clips_only_outliers_and_its_state_survives_json(norms, warmup, ceiling):
    clip = ZClip(warmup=warmup, ceiling=ceiling)
    state = clip.initial()
    for norm in norms:
        before = json.dumps(state, allow_nan=False)
        mean, deviation = state["mean"], math.sqrt(state["variance"])
        ready = len(state["first"]) == warmup

        after, bound = clip.update(json.loads(before), norm)

        assert json.dumps(state) == before
        assert (after, bound) == clip.update(state, norm)
        assert bound <= ceiling
        if not math.isfinite(norm):
            assert (after, bound) == (state, ceiling)
        elif ready and norm - mean > 2.5 * deviation:
            # The published reciprocal form, wherever it is defined.
            if deviation > 1e-9 * norm:
                z = (norm - mean) / deviation
                expected = mean + 2.5 * deviation / (z / 2.5)
                assert bound == pytest.approx(min(expected, ceiling), rel=1e-6)
            assert bound < norm
        else:
            assert bound == ceiling
        state = after


def test_a_spike_hardly_moves_zclip_and_a_new_level_does():
    clip = ZClip(warmup=4)
    state = clip.initial()
    for norm in [1.0, 1.2, 0.8, 1.0]:
        state, _ = clip.update(state, norm)

    spiked, bound = clip.update(state, 100.0)

    assert 1.0 < bound < 1.01
    assert spiked["mean"] == pytest.approx(1.0, abs=1e-3)
    for _ in range(400):
        state, bound = clip.update(state, 1.3)
    assert bound == math.inf
    assert state["mean"] == pytest.approx(1.3, abs=1e-2)


def test_zclips_bound_clips_the_gradients_of_the_very_step():
    clip = ZClip(warmup=2, ceiling=5.0)
    state = clip.initial()
    seen = []
    for value in (1.0, 1.0, 8.0, math.inf, 1.0):
        gradient = torch.tensor([value])
        norm = global_norm([gradient], 2.0, None)
        state, bound = clip.update(state, norm.item())
        untouched = clip_([gradient], norm, bound)
        seen.append((gradient.item(), bool(untouched)))

    assert seen == [
        (1.0, False),
        (1.0, False),
        (pytest.approx(1.0, rel=1e-5), False),
        (math.inf, True),
        (1.0, False),
    ]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: clip_grad_value_([], 0.0), "clip_value must be positive, got 0.0"),
        (lambda: clip_grad_value_([], math.nan), "clip_value must be positive"),
        (lambda: clip_grad_adaptive_([], 0.0), "clipping and eps must be positive, got 0.0"),
        (lambda: ZClip(decay=1.0), "decay must be from 0 and below 1"),
        (lambda: ZClip(warmup=0), "warmup must be a whole number from 1"),
        (lambda: ZClip(threshold=0.0), "threshold must be positive"),
        (lambda: ZClip(ceiling=math.nan), "ceiling must be positive"),
    ],
)
def test_bounds_that_are_none_are_refused(make, words):
    with pytest.raises(GuardError, match=words):
        make()


@pytest.mark.parametrize("clip", [lambda p: clip_grad_value_(p, 1.0), clip_grad_adaptive_])
def test_no_kind_of_clipping_makes_the_host_wait(clip):
    weights = [
        nn.Parameter(torch.ones(3, 2, dtype=t, device="meta"))
        for t in (torch.float32, torch.bfloat16)
    ]
    for weight in weights:
        weight.grad = torch.ones_like(weight)

    assert clip(weights).device.type == "meta"
