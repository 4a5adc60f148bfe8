"""A head whose logits exist a chunk of tokens at a time computes what head and loss do."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld, SingleCommunicator, differentiable
from trainwright.sharding import ShardingError
from trainwright.sharding.data.testing import RecordingCommunicator
from trainwright.sharding.tensor import (
    HeadLoss,
    linear_cross_entropy,
    linear_cross_entropy_sum,
    vocab_parallel_cross_entropy,
)
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.sequence import SequenceSharding, enter_sequence


def by_token(hidden, weight, labels, tp, *, token_weights, **options):
    """The weighted sum of `linear_cross_entropy`, as a caller would write it."""
    losses = linear_cross_entropy(hidden, weight, labels, tp, **options)
    return (losses * token_weights).sum()


BOTH = pytest.mark.parametrize("function", [by_token, linear_cross_entropy_sum])


def case(seed, tokens=7, width=5, vocabulary=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    token_weights = torch.randn(tokens, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, bias, token_weights


def plain(hidden, weight, bias, token_weights, labels, loss):
    """Return the sum and the gradients of all four, of one process in float64."""
    own = [t.detach().double().requires_grad_() for t in (hidden, weight, bias, token_weights)]
    logits = F.linear(own[0], own[1], own[2])[:, : loss.vocab_size]
    losses = F.cross_entropy(
        logits,
        labels,
        reduction="none",
        ignore_index=loss.ignore_index,
        label_smoothing=loss.label_smoothing,
    )
    square = torch.where(labels == loss.ignore_index, 0.0, logits.logsumexp(1).square())
    total = ((losses + loss.z_loss * square) * own[3]).sum()
    (3.0 * total).backward()
    return total.detach(), [tensor.grad for tensor in own]


def parallel(function, tensors, labels, cut, loss):
    """Return the same over the ranks of a cut, replicated ones checked to be equal."""
    hidden, weight, bias, token_weights = tensors

    def run(tp):
        own = [
            hidden.clone(),
            cut.take(weight, 0, tp.rank).clone(),
            cut.take(bias, 0, tp.rank).clone(),
            token_weights.clone(),
        ]
        for tensor in own:
            tensor.requires_grad_()
        total = function(own[0], own[1], labels, tp, bias=own[2], token_weights=own[3], loss=loss)
        (3.0 * total).backward()
        return total.detach(), [tensor.grad for tensor in own]

    results = LocalWorld(cut.num_ranks).run(run)
    for total, gradients in results:
        assert torch.equal(total, results[0][0])
        assert torch.equal(gradients[0], results[0][1][0]), "the hidden gradient is partial"
        assert torch.equal(gradients[3], results[0][1][3])
    first = results[0][1]
    whole = [cut.join([gradients[at] for _, gradients in results], 0) for at in (1, 2)]
    return results[0][0], [first[0], *whole, first[3]]


@BOTH
@settings(max_examples=8)
@given(
    data=st.data(), seed=st.integers(0, 99), dtype=st.sampled_from([torch.float64, torch.float32])
)
def test_sums_and_all_gradients_are_those_of_one_process(function, data, seed, dtype):
    ranks = data.draw(st.integers(1, 3))
    vocabulary = data.draw(st.integers(4, 11))
    cut = data.draw(
        st.sampled_from(
            [
                Cut.uneven(vocabulary, ranks),
                Cut.of_sizes([*[0] * (ranks - 1), vocabulary]),
                Cut.joined(Cut.uneven(3, ranks), Cut.uneven(vocabulary - 3, ranks)),
            ]
        )
    )
    loss = HeadLoss(
        cut,
        vocab_size=data.draw(st.integers(4, vocabulary)),
        label_smoothing=data.draw(st.sampled_from([0.0, 0.2])),
        z_loss=data.draw(st.sampled_from([0.0, 0.01])),
        chunk_tokens=data.draw(st.sampled_from([None, 1, 3, 7, 100])),
    )
    tensors = case(seed, vocabulary=vocabulary, dtype=dtype)
    labels = torch.randint(4, (7,), generator=torch.Generator().manual_seed(seed))
    labels[3] = -100

    total, gradients = parallel(function, tensors, labels, cut, loss)

    expected, expected_gradients = plain(*tensors, labels, loss)
    # Sums of some hundred terms of at most about 30, each of a few roundings.
    bound = 4096 * torch.finfo(dtype).eps
    torch.testing.assert_close(total.double(), expected, rtol=bound, atol=bound)
    for gradient, of_one in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), of_one, rtol=bound, atol=bound)
    norm = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
    expected_norm = torch.stack([gradient.norm() for gradient in expected_gradients]).norm()
    torch.testing.assert_close(norm, expected_norm, rtol=bound, atol=bound)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_summed_over_chunks_in_float32(function, dtype):
    *tensors, token_weights = case(1, tokens=256, vocabulary=16, dtype=dtype)
    tensors = (*tensors, token_weights.abs())
    labels = torch.randint(16, (256,), generator=torch.Generator().manual_seed(1))
    cut = Cut.even(16, 2)

    total, gradients = parallel(function, tensors, labels, cut, HeadLoss(chunk_tokens=1))

    expected, expected_gradients = plain(*tensors, labels, HeadLoss())
    # Each term is rounded by half an eps, at random, and the whole once more; sums kept in low
    # precision are off by 2 to 6 eps here.
    eps = torch.finfo(dtype).eps
    assert total.dtype == torch.float32
    assert abs(total.double() - expected) <= eps * expected
    for gradient, of_one in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == dtype
        assert (gradient.double() - of_one).abs().max() <= eps * of_one.abs().max()


@BOTH
def test_small_gradients_survive_float16_under_a_loss_scale(function):
    # 2048 words of equal probability: a gradient of 1/2048 times a token's weight of 1/1024 is
    # below float16's smallest number until the loss scale of 65536 reaches it.
    hidden = torch.ones(1, 1, dtype=torch.float16)
    weight = torch.zeros(2048, 1, dtype=torch.float16, requires_grad=True)
    weights = torch.full((1,), 2.0**-14)

    tp = SingleCommunicator()
    total = function(hidden, weight, torch.tensor([0]), tp, token_weights=weights)
    (total * 2.0**16).backward()

    assert weight.grad[5].item() == pytest.approx(4 / 2048, rel=1e-3)


def collectives(function, size, entered, tokens=6, chunk=2):
    def run(tp):
        calls = []
        recording = RecordingCommunicator(tp, calls)
        hidden = torch.ones(tokens, 3, requires_grad=True)
        weight = torch.ones(4, 3, requires_grad=True)
        labels = torch.zeros(tokens, dtype=torch.int64)
        total = function(
            hidden,
            weight,
            labels,
            recording,
            token_weights=torch.ones(tokens),
            loss=HeadLoss(chunk_tokens=chunk),
            input_is_entered=entered,
        )
        forward = [(call.operation, call.numel) for call in calls]
        total.backward()
        return forward, [(call.operation, call.numel) for call in calls][len(forward) :]

    return LocalWorld(size).run(run)


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_losses_take_one_gather_and_hidden_states_one_reduction(size, entered):
    forward = [("all_gather", size * 3 * 6)] if size > 1 else []
    backward = [("all_reduce", 18)] if size > 1 and not entered else []

    assert collectives(by_token, size, entered) == [(forward, backward)] * size


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_the_sum_gathers_the_same_numbers_chunk_by_chunk(size, entered):
    forward = [("all_gather", size * 3 * 2)] * 3 if size > 1 else []
    backward = [("all_reduce", 18)] if size > 1 and not entered else []

    assert collectives(linear_cross_entropy_sum, size, entered) == [(forward, backward)] * size


@BOTH
def test_an_entered_input_has_the_terms_of_a_sum_as_gradient_that_the_entry_adds_up(function):
    # torchtitan 3412: such a gradient, partial over the ranks, was taken for a replicated one.
    hidden, weight, _, token_weights = case(3)
    labels = torch.arange(7)

    def run(tp, enters):
        own = hidden.clone().requires_grad_()
        part = weight.chunk(2)[tp.rank].clone()
        entered = differentiable.replicate_to_partial(own, tp) if enters else own
        function(
            entered, part, labels, tp, token_weights=token_weights, input_is_entered=True
        ).backward()
        return own.grad

    partial = LocalWorld(2).run(run, False)
    summed = LocalWorld(2).run(run, True)
    _, expected = plain(hidden, weight, torch.zeros(8), token_weights, labels, HeadLoss())
    assert not torch.allclose(partial[0], partial[1])
    for found in (sum(partial), *summed):
        torch.testing.assert_close(3.0 * found, expected[0])


@BOTH
@pytest.mark.parametrize("length", [4, 3])
@pytest.mark.parametrize("sequence", [SequenceSharding(1), SequenceSharding(1, keeps_whole=True)])
def test_positions_of_a_cut_sequence_enter_the_head_and_get_their_gradient(
    function, length, sequence
):
    hidden, weight, _, token_weights = case(4, tokens=2 * length)
    labels = (torch.arange(2 * length) % 8).view(2, length)
    sequence = attrs.evolve(sequence, length=length)
    positions = Cut.uneven(length, 2)

    def run(tp):
        calls = []
        recording = RecordingCommunicator(tp, calls)
        own = positions.take(hidden.view(2, length, 5), 1, tp.rank).clone().requires_grad_()
        part = weight.chunk(2)[tp.rank].clone().requires_grad_()
        function(
            enter_sequence(own, recording, sequence),
            part,
            labels,
            tp,
            token_weights=token_weights.view(2, length),
            input_is_entered=True,
        ).backward()
        return own.grad, part.grad, [call.operation for call in calls]

    results = LocalWorld(2).run(run)
    _, expected = plain(hidden, weight, torch.zeros(8), token_weights, labels.view(-1), HeadLoss())
    joined = positions.join([result[0] for result in results], 1)
    torch.testing.assert_close(3.0 * joined.reshape(-1, 5), expected[0])
    torch.testing.assert_close(3.0 * torch.cat([result[1] for result in results]), expected[1])
    assert results[0][2] == ["all_gather", "reduce_scatter"]


@BOTH
@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none_and_the_rest_is_right(function, frozen):
    hidden, weight, _, token_weights = case(4)
    labels = torch.arange(7)
    own = [hidden.clone(), weight.clone()]
    own[1 - frozen].requires_grad_()

    function(*own, labels, SingleCommunicator(), token_weights=token_weights).backward()

    _, expected = plain(hidden, weight, torch.zeros(8), token_weights, labels, HeadLoss())
    assert own[frozen].grad is None
    torch.testing.assert_close(3.0 * own[1 - frozen].grad, expected[1 - frozen])


@BOTH
def test_a_frozen_weight_on_one_rank_alone_keeps_no_other_rank_waiting(function):
    def run(tp):
        hidden = torch.ones(2, 3, requires_grad=True)
        weight = torch.ones(4, 3, requires_grad=tp.rank == 0)
        weights = torch.ones(2)
        loss = HeadLoss(chunk_tokens=1)
        labels = torch.zeros(2, dtype=torch.int64)
        function(hidden, weight, labels, tp, token_weights=weights, loss=loss).backward()
        return hidden.grad

    first, second = LocalWorld(2).run(run)
    assert torch.equal(first, second)


@BOTH
@pytest.mark.parametrize("size", [1, 2])
def test_an_ignored_token_adds_nothing_to_any_gradient_whatever_its_logits(function, size):
    hidden, weight, bias, token_weights = case(5)
    labels = torch.arange(7)
    labels[2] = -100
    kept = torch.tensor([0, 1, 3, 4, 5, 6])
    hidden[2] = 1e200
    weight[1, 0] = 1e200
    weight[:, 1:] = 0.0
    hidden[kept] = hidden[kept].clamp(-1e-200, 1e-200)

    found = parallel(
        function, (hidden, weight, bias, token_weights), labels, Cut.even(8, size), HeadLoss()
    )

    alone = (hidden[kept], weight, bias, token_weights[kept])
    expected, gradients = plain(*alone, labels[kept], HeadLoss())
    torch.testing.assert_close(found[0], expected)
    assert found[1][0][2].tolist() == [0.0] * 5
    for at in (1, 2):
        assert found[1][at].isfinite().all()
        torch.testing.assert_close(found[1][at], gradients[at])


@BOTH
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens_or_none_are_no_special_case(function, tokens):
    def run(tp):
        hidden = torch.ones(tokens, 3, requires_grad=True)
        weight = torch.ones(2, 3, requires_grad=True)
        labels = torch.zeros(tokens, dtype=torch.int64)
        total = function(hidden, weight, labels, tp, token_weights=torch.ones(tokens))
        total.backward()
        return total.item(), hidden.grad.shape, weight.grad.abs().max().item() > 0

    value = tokens * torch.tensor(4.0).log().item()
    assert LocalWorld(2).run(run) == [(pytest.approx(value), (tokens, 3), tokens > 0)] * 2


@BOTH
def test_at_most_a_chunk_of_logits_is_ever_there(function):
    largest = []

    class Noting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape[-1:] == (1000,):
                largest.append(result.untyped_storage().nbytes())
            return result

    hidden = torch.ones(1024, 2, requires_grad=True)
    weight = torch.ones(1000, 2, requires_grad=True)
    labels = torch.zeros(1024, dtype=torch.int64)
    with Noting():
        function(
            hidden, weight, labels, SingleCommunicator(), token_weights=torch.ones(1024)
        ).backward()

    assert 0 < max(largest) <= 1024 * 1000 * 4 / 8


def test_losses_per_token_have_the_labels_shape_and_may_be_weighed_later():
    hidden, weight, _, _ = case(6, tokens=6)
    labels = torch.arange(6)
    logits = hidden.view(2, 3, 5) @ weight.t()

    losses = linear_cross_entropy(
        hidden.view(2, 3, 5), weight, labels.view(2, 3), SingleCommunicator()
    )

    expected = vocab_parallel_cross_entropy(logits, labels.view(2, 3), SingleCommunicator())
    torch.testing.assert_close(losses, expected)


@BOTH
def test_without_gradients_the_value_is_the_same(function):
    hidden, weight, bias, token_weights = case(7)
    labels = torch.arange(7)
    options = {"token_weights": token_weights, "bias": bias, "loss": HeadLoss(chunk_tokens=2)}

    with torch.no_grad():
        total = function(hidden, weight, labels, SingleCommunicator(), **options)

    expected, _ = plain(hidden, weight, bias, token_weights, labels, HeadLoss())
    torch.testing.assert_close(total, expected)


@BOTH
def test_under_autocast_products_are_in_its_dtype_and_gradients_in_the_parameters(function):
    hidden, weight, bias, token_weights = case(8, dtype=torch.float32)
    labels = torch.arange(7)
    own = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]

    with torch.autocast("cpu", torch.bfloat16):
        total = function(
            own[0], own[1], labels, SingleCommunicator(), bias=own[2], token_weights=token_weights
        )
    (3.0 * total).backward()

    low = [tensor.bfloat16() for tensor in (hidden, weight, bias)]
    expected, gradients = plain(*low, token_weights, labels, HeadLoss())
    assert total.dtype == torch.float32
    assert abs(total.double() - expected) <= 0.5
    for tensor, gradient in zip(own, gradients, strict=False):
        assert tensor.grad.dtype == torch.float32
        assert (tensor.grad - gradient).abs().max() <= 0.05 * gradient.abs().max()


def test_a_second_backward_through_the_sum_says_why_it_cannot_be():
    hidden, weight, _, _ = case(9)
    total = linear_cross_entropy_sum(
        hidden, weight.requires_grad_(), torch.arange(7), SingleCommunicator()
    )
    total.backward(retain_graph=True)

    with pytest.raises(ShardingError, match="a second backward"):
        total.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 4)}, r"must agree in .* got \(3, 4\) and \(2,\)"),
        ({"weight": torch.zeros(8, 3)}, r"the D=4 of hidden, got \(8, 3\)"),
        ({"weight": torch.zeros(8)}, r"weight must be \[V/tp, D\]"),
        ({"bias": torch.zeros(7)}, r"like weight \(8, 4\), got \(7,\)"),
        ({"weight": torch.zeros(8, 4).double()}, "one floating-point dtype"),
        ({"labels": torch.tensor([0, 8])}, r"label must be in 0\.\.7"),
        ({"loss": HeadLoss(vocab_size=9)}, r"vocab_size=9 must be in 0\.\.8"),
        ({"token_weights": torch.zeros(3)}, r"the same shape, got \(3,\) and \(2,\)"),
    ],
)
def test_inputs_of_a_head_that_do_not_fit_are_refused(change, message):
    given_ = {
        "hidden": torch.zeros(2, 4),
        "weight": torch.zeros(8, 4),
        "labels": torch.tensor([0, 1]),
        **change,
    }

    with pytest.raises(ShardingError, match=message):
        linear_cross_entropy_sum(tp=SingleCommunicator(), **given_)
