"""Smoothing, z-loss, padding and any cut of the vocabulary change nothing but the vocabulary."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld, SingleCommunicator
from trainwright.sharding import ShardingError
from trainwright.sharding.data.testing import RecordingCommunicator
from trainwright.sharding.tensor import vocab_parallel_cross_entropy
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.head_loss import HeadLoss

OPTIONS = st.fixed_dictionaries(
    {
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "z_loss": st.sampled_from([0.0, 1e-2]),
        "ignore_index": st.sampled_from([-100, 0, 3]),
    }
)


def plain(logits, labels, weights, *, vocab_size, label_smoothing, z_loss, ignore_index):
    """Return losses and the gradient of their weighted sum, in float64, padding not there."""
    own = logits.detach().double().requires_grad_()
    true = own[:, :vocab_size]
    losses = F.cross_entropy(
        true,
        labels,
        reduction="none",
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
    )
    square = torch.where(labels == ignore_index, 0.0, true.logsumexp(1).square())
    losses = losses + z_loss * square
    (losses * weights).sum().backward()
    return losses.detach(), own.grad


def parallel(logits, labels, weights, cut, **options):
    """Return the same over the ranks of a cut."""

    def run(tp):
        own = cut.take(logits, 1, tp.rank).clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(own, labels, tp, cut=cut, **options)
        (losses * weights).sum().backward()
        return losses.detach(), own.grad

    results = LocalWorld(cut.num_ranks).run(run)
    for losses, _ in results:
        assert torch.equal(losses, results[0][0])
    return results[0][0], cut.join([gradient for _, gradient in results], 1)


@st.composite
def cuts(draw):
    """Draw a cut of a vocabulary of at least four, and how much of it is no padding."""
    ranks = draw(st.integers(1, 3))
    size = draw(st.integers(4, 14))
    kind = draw(st.sampled_from(["uneven", "sizes", "joined"]))
    if kind == "uneven":
        cut = Cut.uneven(size, ranks)
    elif kind == "sizes":
        edges = sorted(draw(st.integers(0, size)) for _ in range(ranks - 1))
        pairs = zip([0, *edges], [*edges, size], strict=True)
        cut = Cut.of_sizes(stop - start for start, stop in pairs)
    else:
        cut = Cut.joined(Cut.uneven(size // 2, ranks), Cut.uneven(size - size // 2, ranks))
    return cut, draw(st.integers(4, size))


@settings(max_examples=15)
@example((Cut.of_sizes([0, 5, 3]), 5), {"label_smoothing": 0.1, "z_loss": 0.01}, 0, torch.float64)
@given(cuts(), OPTIONS, st.integers(0, 99), st.sampled_from([torch.float64, torch.float32]))
def test_every_option_over_every_cut_is_the_loss_of_one_process(drawn, options, seed, dtype):
    cut, vocab_size = drawn
    options = {"ignore_index": -100, **options, "vocab_size": vocab_size}
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, cut.size, generator=generator, dtype=dtype) * 5
    labels = torch.randint(vocab_size, (6,), generator=generator)
    weights = torch.randn(6, generator=generator, dtype=torch.float64)

    losses, gradient = parallel(logits, labels, weights, cut, **options)

    expected, expected_gradient = plain(logits, labels, weights, **options)
    # Some tens of roundings of numbers of about the logits' size, and of their squares.
    bound = 512 * torch.finfo(dtype).eps
    torch.testing.assert_close(losses.double(), expected, rtol=bound, atol=bound)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=bound, atol=bound)
    assert gradient[:, vocab_size:].count_nonzero() == 0
    norm, expected_norm = gradient.double().norm(), expected_gradient.norm()
    torch.testing.assert_close(norm, expected_norm, rtol=bound, atol=bound)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_smoothed_label_is_spread_over_the_whole_vocabulary_not_over_one_ranks_part(ranks):
    # All logits 0 but the label's, which is 10: a share of 0.3 lies on 7 other words, wherever.
    logits = torch.zeros(1, 8, dtype=torch.float64)
    logits[0, 0] = 10.0
    cut = Cut.even(8, ranks)

    losses, gradient = parallel(logits, torch.tensor([0]), 1.0, cut, label_smoothing=0.3)

    log_sum = torch.tensor(torch.e**10 + 7, dtype=torch.float64).log().item()
    assert losses.item() == pytest.approx(log_sum - 10 * (0.7 + 0.3 / 8), rel=1e-12)
    assert gradient[0, 7].item() == pytest.approx(torch.e**-log_sum - 0.3 / 8, rel=1e-12)
    assert gradient.sum().item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_padding_has_no_probability_no_share_and_no_gradient_whatever_stands_there(ranks):
    logits = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 4, 2])
    options = {"vocab_size": 5, "label_smoothing": 0.1, "z_loss": 0.1}
    cut = Cut.even(8, ranks)

    found = parallel(logits, labels, torch.ones(3), cut, **options)
    logits[:, 5:] = torch.tensor([torch.nan, torch.inf, 1e9])
    with_rubbish = parallel(logits, labels, torch.ones(3), cut, **options)

    torch.testing.assert_close(with_rubbish, found, rtol=0, atol=0)
    alone = parallel(
        logits[:, :5], labels, torch.ones(3), Cut.even(5, 1), label_smoothing=0.1, z_loss=0.1
    )
    torch.testing.assert_close(found[0], alone[0])
    torch.testing.assert_close(found[1][:, :5], alone[1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_ignored_token_has_no_gradient_under_any_option_whatever_its_logits(ranks):
    logits = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[1] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    labels = torch.tensor([0, -100, 3])
    options = {"label_smoothing": 0.2, "z_loss": 0.1}

    weights = torch.tensor([1.0, torch.nan, 1.0])
    cut = Cut.even(4, ranks)
    losses, gradient = parallel(logits, labels, torch.ones(3), cut, **options)

    assert losses[1].item() == 0.0
    assert gradient[1].tolist() == [0.0] * 4
    assert gradient.isfinite().all()
    # Not even an upstream gradient that is no number comes through.
    assert parallel(logits, labels, weights, cut, **options)[1].isfinite().all()


def test_large_common_offsets_cost_no_accuracy_under_smoothing():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    labels = torch.tensor([1])
    cut = Cut.of_sizes([1, 3])

    losses, gradient = parallel(logits + 20000.0, labels, 1.0, cut, label_smoothing=0.5)

    expected, expected_gradient = parallel(logits, labels, 1.0, cut, label_smoothing=0.5)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-6)


def test_words_masked_with_minus_infinity_keep_a_finite_gradient_under_smoothing():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]], dtype=torch.float64)
    labels = torch.tensor([1])

    losses, gradient = parallel(logits, labels, 1.0, Cut.even(4, 2), label_smoothing=0.5)

    expected, expected_gradient = plain(
        logits, labels, 1.0, vocab_size=4, label_smoothing=0.5, z_loss=0.0, ignore_index=-100
    )
    assert losses.item() == expected.item() == torch.inf
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "vocab_size": 2}])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_option_costs_a_second_collective(options, size):
    def run(tp):
        calls = []
        recording = RecordingCommunicator(tp, calls)
        logits = torch.zeros(5, 2, requires_grad=True)
        labels = torch.zeros(5, dtype=torch.int64)
        vocab_parallel_cross_entropy(logits, labels, recording, **options).sum().backward()
        return [(call.operation, call.numel) for call in calls]

    numbers = 4 if options else 3
    expected = [("all_gather", size * 5 * numbers)] if size > 1 else []
    assert LocalWorld(size).run(run) == [expected] * size


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (4, {"label_smoothing": 1.5}, r"label_smoothing must be in 0\.\.1, got 1.5"),
        (4, {"label_smoothing": -0.1}, "label_smoothing must be"),
        (4, {"z_loss": -1.0}, "z_loss must be finite and at least 0, got -1.0"),
        (4, {"vocab_size": 9}, r"vocab_size=9 must be in 0\.\.8"),
        (4, {"vocab_size": 0}, "vocab_size must be at least 1"),
        (4, {"vocab_size": 3}, r"label must be in 0\.\.2.*got 3"),
        (4, {"cut": Cut.even(8, 4)}, "cut over 4 ranks, tp=2"),
        (4, {"cut": Cut.of_sizes([3, 5])}, "has 4 of the vocabulary, but its cut gives it"),
        (8, {"cut": Cut.whole(8, 2)}, "exactly one rank"),
        (4, {"cut": Cut(8, [[(4, 8)], [(2, 4), (0, 2)]]), "vocab_size": 3}, "must come last"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(columns, options, message):
    def run(tp):
        labels = torch.tensor([3, 0])
        with pytest.raises(ShardingError, match=message):
            vocab_parallel_cross_entropy(torch.zeros(2, columns), labels, tp, **options)

    LocalWorld(2).run(run)


def test_chunks_of_no_tokens_are_refused():
    with pytest.raises(ShardingError, match="chunk_tokens must be at least 1, got 0"):
        HeadLoss(chunk_tokens=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_narrow_integers_are_looked_up_like_others(dtype):
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 3, 5, 7])

    for cut in (Cut.even(8, 2), Cut.joined(Cut.even(4, 2), Cut.even(4, 2))):
        found = parallel(logits, labels.to(dtype), torch.ones(4), cut)
        torch.testing.assert_close(found, parallel(logits, labels, torch.ones(4), cut))


def test_a_rank_of_padding_alone_adds_nothing():
    logits = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, 0])

    found = parallel(logits, labels, torch.ones(2), Cut.even(4, 2), vocab_size=2, z_loss=0.1)

    alone = parallel(logits[:, :2], labels, torch.ones(2), Cut.even(2, 1), z_loss=0.1)
    torch.testing.assert_close(found[0], alone[0])
    torch.testing.assert_close(found[1][:, :2], alone[1])


def test_second_differences_of_every_option_agree():
    logits = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, -100, 2])

    assert torch.autograd.gradcheck(
        lambda own: vocab_parallel_cross_entropy(
            own, labels, SingleCommunicator(), label_smoothing=0.3, z_loss=0.5, vocab_size=3
        ),
        logits.requires_grad_(),
    )
