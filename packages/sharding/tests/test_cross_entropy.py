"""Vocabulary-parallel cross-entropy is the plain one: losses, gradients, memory, traffic."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld, SingleCommunicator
from trainwright.sharding import ShardingError, vocab_parallel_cross_entropy
from trainwright.sharding.tensor import loss_terms
from trainwright.sharding.testing import shard_sizes


def parallel(logits, labels, weights, size, **options):
    """Return losses and the joined gradient of ``(losses * weights).sum()`` over the ranks."""

    def run(tp):
        own = logits.chunk(size, -1)[tp.rank].detach().clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(own, labels, tp, **options)
        (losses * weights).sum().backward()
        return losses.detach(), own.grad

    results = LocalWorld(size).run(run)
    for losses, _ in results:
        assert torch.equal(losses, results[0][0])
    return results[0][0], torch.cat([gradient for _, gradient in results], -1)


def plain(logits, labels, weights, **options):
    own = logits.detach().double().requires_grad_()
    losses = F.cross_entropy(
        own.view(-1, own.shape[-1]), labels.view(-1), reduction="none", **options
    )
    losses = losses.view(labels.shape)
    (losses * weights).sum().backward()
    return losses.detach(), own.grad


def tolerance(dtype):
    # Each loss and gradient is a few roundings of numbers of about the logits' size (below 64);
    # the gradient is rounded once more to the dtype of the logits.
    computed_in = torch.promote_types(dtype, torch.float32)
    return 512 * torch.finfo(computed_in).eps, 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=6)
@given(data=st.data(), shape=st.sampled_from([(7,), (2, 5), (1,), (0,), ()]))
def test_losses_and_gradients_are_those_of_one_process(data, size, dtype, shape):
    vocabulary = data.draw(shard_sizes(size))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scale = data.draw(st.sampled_from([1.0, 10.0]))
    logits = (torch.randn(*shape, vocabulary, generator=generator) * scale).to(dtype)
    labels = torch.randint(vocabulary, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = -100
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)

    losses, gradient = parallel(logits, labels, weights, size)

    expected_losses, expected_gradient = plain(logits, labels, weights)
    loss_bound, gradient_bound = tolerance(dtype)
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    assert gradient.dtype == dtype
    torch.testing.assert_close(losses.double(), expected_losses, rtol=0, atol=loss_bound)
    torch.testing.assert_close(
        gradient.double(), expected_gradient, rtol=gradient_bound, atol=loss_bound + gradient_bound
    )


def test_gradients_are_exact_to_second_differences():
    def run(tp):
        logits = torch.randn(
            3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        ).requires_grad_()
        labels = torch.tensor([1, -100, 3])
        return torch.autograd.gradcheck(
            lambda own: vocab_parallel_cross_entropy(own, labels, tp), logits
        )

    assert LocalWorld(1).run(run) == [True]


@pytest.mark.parametrize("size", [1, 2])
def test_ignored_tokens_have_no_loss_and_no_gradient_whatever_their_logits(size):
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    logits[1] = torch.tensor([float("nan"), float("inf"), 0.0, 1.0])

    labels = torch.tensor([0, 9, 3])
    losses, gradient = parallel(logits, labels, torch.ones(3), size, ignore_index=9)

    assert losses[1].item() == 0.0
    assert gradient[1].tolist() == [0.0] * 4
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("ignore_index", [-100, 0, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 2])
def test_any_label_can_be_the_one_to_ignore(ignore_index, size):
    logits = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, ignore_index, 2, 3])
    weights = torch.arange(1.0, 5.0, dtype=torch.float64)

    found = parallel(logits, labels, weights, size, ignore_index=ignore_index)

    torch.testing.assert_close(found, plain(logits, labels, weights, ignore_index=ignore_index))


def test_large_common_offsets_cost_no_accuracy():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]) + 20000.0
    labels = torch.tensor([0])

    losses, gradient = parallel(logits, labels, torch.ones(1), 2)

    expected, expected_gradient = plain(logits - 20000.0, labels, torch.ones(1))
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("masked", [slice(2, 4), slice(0, 2), slice(1, 4)])
def test_a_masked_part_of_the_vocabulary_has_no_probability(masked):
    logits = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits -= 1000.0
    logits[:, masked] = -torch.inf
    label = torch.tensor([0 if masked.start else 3])

    found = parallel(logits, label, torch.ones(1), 2)

    torch.testing.assert_close(found, plain(logits, label, torch.ones(1)))


@pytest.mark.parametrize(("size", "tokens"), [(1, 5), (2, 5), (4, 5), (2, 0)])
def test_one_gather_of_three_numbers_a_token_and_nothing_in_the_backward(size, tokens):
    class Counting:
        def __init__(self, comm):
            self.comm = comm
            self.calls = []

        def __getattr__(self, name):
            if name not in ("rank", "size", "device", "name"):
                self.calls.append(name)
            return getattr(self.comm, name)

        def all_gather(self, output, input, **options):
            self.calls.append(("all_gather", input.numel()))
            return self.comm.all_gather(output, input, **options)

    def run(tp):
        counting = Counting(tp)
        logits = torch.zeros(tokens, 3, requires_grad=True)
        labels = torch.zeros(tokens, dtype=torch.int64)
        vocab_parallel_cross_entropy(logits, labels, counting).sum().backward()
        return counting.calls

    expected = [("all_gather", 15)] if size > 1 and tokens else []
    assert LocalWorld(size).run(run) == [expected] * size


def test_nothing_as_large_as_the_logits_is_kept_beside_them():
    kept = []
    logits = torch.randn(64, 512).bfloat16().requires_grad_()
    labels = torch.randint(512, (64,))

    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        vocab_parallel_cross_entropy(logits, labels, SingleCommunicator())

    large = [t for t in kept if t.numel() >= logits.numel()]
    assert [t.data_ptr() for t in large] == [logits.data_ptr()]
    assert sum(t.nbytes for t in kept if t.numel() < logits.numel()) <= 64 * 16


def test_chunks_cover_every_row_once():
    for rows, columns in [(1, 1), (7, 1 << 17), (5, 1 << 20), (3, 1), (1 << 19, 4)]:
        chunks = list(loss_terms.blocks(torch.empty(1, 1).expand(rows, columns)))
        assert [row for chunk in chunks for row in range(rows)[chunk]] == list(range(rows))


def test_many_chunks_are_one_loss():
    logits = torch.randn(40, 1 << 14, generator=torch.Generator().manual_seed(3))
    labels = torch.randint(1 << 14, (40,), generator=torch.Generator().manual_seed(4))

    losses, gradient = parallel(logits, labels, torch.ones(40), 2)

    expected, expected_gradient = plain(logits, labels, torch.ones(40))
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-9)


def test_one_number_of_the_loss_needs_no_other_gradient():
    logits = torch.randn(3, 4, requires_grad=True)

    losses = vocab_parallel_cross_entropy(logits, torch.tensor([0, 1, 2]), SingleCommunicator())
    losses[1].backward()

    assert logits.grad[[0, 2]].abs().max().item() == 0.0
    assert logits.grad[1].abs().max().item() > 0.0


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (
            torch.zeros(3, 4),
            torch.tensor([0, 1]),
            r"must agree in .* got \(3, 4\) and \(2,\)",
        ),
        (torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.int64), "must agree"),
        (torch.zeros(2, 4, dtype=torch.int64), torch.tensor([0, 1]), "must be floating-point"),
        (torch.zeros(2, 4), torch.tensor([0.0, 1.0]), "label must be integers"),
        (
            torch.zeros(2, 4),
            torch.tensor([0, 4]),
            r"or -100 to be ignored, got 4 at \(1,\)",
        ),
        (torch.zeros(2, 4), torch.tensor([-1, 0]), r"got -1 at \(0,\)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_before_any_communication(logits, labels, message):
    with pytest.raises(ShardingError, match=message):
        vocab_parallel_cross_entropy(logits, labels, SingleCommunicator())


def test_a_label_above_one_ranks_part_is_right_when_another_rank_holds_it():
    losses, _ = parallel(torch.zeros(1, 8), torch.tensor([7]), torch.ones(1), 4)

    torch.testing.assert_close(losses, torch.full((1,), 8.0).log())
