import functools
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives.differentiable import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    partial_to_replicate,
    partial_to_shard,
    reduce_scatter,
    replicate_to_partial,
    replicate_to_shard,
    shard_to_partial,
    shard_to_replicate,
)
from trainwright.collectives.errors import UsageError
from trainwright.collectives.local_world import LocalWorld

# What all ranks' tensors become, by rank: the oracle of a forward or a backward.


def same(tensors, dim):
    return tensors


def total(tensors, dim):
    return [sum(tensors)] * len(tensors)


def joined(tensors, dim):
    return [torch.cat(tensors, dim)] * len(tensors)


def own_part(tensors, dim):
    return [part.chunk(len(tensors), dim)[rank] for rank, part in enumerate(tensors)]


def part_of_total(tensors, dim):
    return own_part(total(tensors, dim), dim)


def without_dim(fn):
    return lambda tensor, comm, dim: fn(tensor, comm)


# Name: the function, what its forward and its backward do, whether its input is a whole tensor.
OPERATIONS = {
    "partial_to_replicate": (without_dim(partial_to_replicate), total, same, True),
    "replicate_to_partial": (without_dim(replicate_to_partial), same, total, True),
    "shard_to_replicate": (shard_to_replicate, joined, own_part, False),
    "replicate_to_shard": (replicate_to_shard, own_part, joined, True),
    "partial_to_shard": (partial_to_shard, part_of_total, joined, True),
    "shard_to_partial": (shard_to_partial, joined, part_of_total, False),
    "all_reduce": (without_dim(all_reduce), total, total, True),
    "all_gather": (all_gather, joined, part_of_total, False),
    "reduce_scatter": (reduce_scatter, part_of_total, joined, True),
}
TRUE_ADJOINTS = [
    "partial_to_shard",
    "shard_to_partial",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
]


def run(size, fn, *args):
    return LocalWorld(size, timeout_s=20.0).run(fn, *args)


def whole_numbers(seed, shape, dtype=torch.float64):
    """Small whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def strided(tensor, stride_order):
    """The same values with another order of dims in memory, and gaps between the elements."""
    inverse = [stride_order.index(dim) for dim in range(tensor.ndim)]
    spread = tensor.permute(stride_order).repeat_interleave(2, dim=-1)
    return spread[..., ::2].permute(inverse)


@st.composite
def cases(draw):
    size = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= size
    return size, tuple(shape), dim, draw(st.permutations(range(len(shape))))


def forward_and_backward(operation, inputs, gradients, dim):
    """Each rank's result and input gradient for each rank's input and result gradient."""

    def body(comm):
        source = inputs[comm.rank].detach().requires_grad_()
        result = operation(source, comm, dim)
        result.backward(gradients[comm.rank])
        return result.detach(), source.grad

    return zip(*run(len(inputs), body), strict=True)


# ---------------------------------------------------------------- each function


@pytest.mark.parametrize("name", OPERATIONS)
@given(case=cases())
def test_forward_and_backward_are_those_of_the_placement(name, case):
    operation, forth, back, takes_whole = OPERATIONS[name]
    size, shape, dim, order = case
    short = [*shape]
    short[dim] //= size
    inputs = [whole_numbers(rank, shape if takes_whole else short) for rank in range(size)]
    expected = forth(inputs, dim)
    gradients = [whole_numbers(9 + rank, expected[rank].shape) for rank in range(size)]

    results, found = forward_and_backward(
        operation,
        [strided(tensor, order) for tensor in inputs],
        [strided(tensor, order) for tensor in gradients],
        dim,
    )

    for rank in range(size):
        assert torch.equal(results[rank], expected[rank])
        assert torch.equal(found[rank], back(gradients, dim)[rank])


@given(
    size=st.integers(1, 4),
    data=st.data(),
    shape=st.lists(st.integers(0, 3), max_size=2),
)
def test_broadcast_copies_roots_values_and_sums_the_gradients_there(size, data, shape):
    root = data.draw(st.integers(0, size - 1))
    inputs = [whole_numbers(rank, shape) for rank in range(size)]
    gradients = [whole_numbers(9 + rank, shape) for rank in range(size)]

    results, found = forward_and_backward(
        lambda tensor, comm, dim: broadcast(tensor, comm, root), inputs, gradients, None
    )

    for rank in range(size):
        assert torch.equal(results[rank], inputs[root])
        assert torch.equal(found[rank], sum(gradients) * (rank == root))


@given(
    splits=st.integers(1, 4).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(0, 3), min_size=size, max_size=size),
            min_size=size,
            max_size=size,
        )
    )
)
def test_all_to_all_sends_rows_forth_and_their_gradients_back(splits):
    size = len(splits)
    received = [[row[rank] for row in splits] for rank in range(size)]
    inputs = [whole_numbers(rank, (sum(splits[rank]), 2)) for rank in range(size)]
    gradients = [whole_numbers(9 + rank, (sum(received[rank]), 2)) for rank in range(size)]

    def exchanged(tensors, sent):
        parts = [tensor.split(rows) for tensor, rows in zip(tensors, sent, strict=True)]
        return [torch.cat([part[rank] for part in parts]) for rank in range(size)]

    results, found = forward_and_backward(
        lambda tensor, comm, dim: all_to_all(tensor, comm, received[comm.rank], splits[comm.rank]),
        [tensor.T.contiguous().T for tensor in inputs],
        gradients,
        None,
    )

    for rank in range(size):
        assert torch.equal(results[rank], exchanged(inputs, splits)[rank])
        assert torch.equal(found[rank], exchanged(gradients, received)[rank])


def test_all_to_all_without_splits_sends_equal_parts():
    results = run(3, lambda comm: all_to_all(torch.arange(6) + 10 * comm.rank, comm))

    assert results[1].tolist() == [2, 3, 12, 13, 22, 23]


class Everywhere(torch.autograd.Function):
    """An operation of all ranks as one function of all their inputs, for `gradcheck`."""

    @staticmethod
    def forward(ctx, operation, *inputs):
        ctx.operation, ctx.inputs = operation, inputs
        return tuple(run(len(inputs), lambda comm: operation(inputs[comm.rank].detach(), comm)))

    @staticmethod
    def backward(ctx, *gradients):
        def body(comm):
            source = ctx.inputs[comm.rank].detach().requires_grad_()
            result = ctx.operation(source, comm)
            return torch.autograd.grad(result, source, gradients[comm.rank])[0]

        return None, *run(len(gradients), body)


@pytest.mark.parametrize("name", [*TRUE_ADJOINTS, "broadcast", "all_to_all"])
def test_true_adjoints_are_the_gradients_of_the_sum_of_all_ranks_losses(name):
    if name == "broadcast":
        operation = functools.partial(broadcast, root=1)
    elif name == "all_to_all":
        operation = all_to_all
    else:
        operation = functools.partial(OPERATIONS[name][0], dim=-1 if name != "all_gather" else 0)
    inputs = [
        torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        for rank in range(2)
    ]

    assert torch.autograd.gradcheck(
        functools.partial(Everywhere.apply, operation), [x.requires_grad_() for x in inputs]
    )


# ---------------------------------------------------------------- groups


def test_broadcast_in_a_subgroup_counts_root_within_it():
    def body(comm):
        group = comm.split(0 if comm.rank > 0 else None)
        if group is None:
            return None
        x = torch.ones(3, requires_grad=True)
        broadcast(x, group, root=0).sum().backward()
        return x.grad.tolist()

    assert run(3, body) == [None, [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    assert run(2, body) == [None, [1.0, 1.0, 1.0]]


def test_broadcast_meets_in_the_backward_when_only_root_trains_its_values():
    def body(comm):
        x = torch.full((2,), float(comm.rank), requires_grad=comm.rank == 1)
        (broadcast(x, comm, root=1) * 3).sum().backward()
        return x.grad

    grads = run(3, body)

    assert [grad if grad is None else grad.tolist() for grad in grads] == [None, [9.0, 9.0], None]


def test_values_without_gradients_pass_too():
    def body(comm):
        numbers = broadcast(torch.tensor([comm.rank]), comm, root=2)
        with torch.no_grad():
            weights = torch.ones(3, requires_grad=True)
            silent = [broadcast(weights, comm, root=0), all_reduce(weights, comm)]
        return (
            numbers.tolist(),
            all_gather(torch.tensor([[comm.rank]]), comm, 1).tolist(),
            [tensor.requires_grad for tensor in silent],
        )

    assert run(3, body) == [([2], [[0, 1, 2]], [False, False])] * 3


class Alone:
    """A group of ranks in which every attempt to communicate fails."""

    def __init__(self, size):
        self.size, self.rank, self.name = size, 0, "alone"


def every_function(tensor, comm):
    for operation, *_ in OPERATIONS.values():
        yield operation(tensor, comm, 0)
    yield broadcast(tensor, comm, 0)
    yield all_to_all(tensor, comm)
    yield all_to_all(tensor, comm, [len(tensor)], [len(tensor)])


def test_one_rank_gets_its_own_tensor_without_communication():
    tensor = torch.ones(3, requires_grad=True)

    assert all(result is tensor for result in every_function(tensor, Alone(1)))


class Counted:
    """A communicator that notes the names of the collectives it is asked for."""

    def __init__(self, comm):
        self.calls = []
        self._comm = comm

    def __getattr__(self, name):
        value = getattr(self._comm, name)
        if isinstance(value, types.MethodType):
            self.calls.append(name)
        return value


@pytest.mark.parametrize(
    ("name", "forth", "back"),
    [
        ("partial_to_replicate", ["all_reduce"], []),
        ("replicate_to_partial", [], ["all_reduce"]),
        ("shard_to_replicate", ["all_gather"], []),
        ("replicate_to_shard", [], ["all_gather"]),
        ("partial_to_shard", ["reduce_scatter"], ["all_gather"]),
        ("shard_to_partial", ["all_gather"], ["reduce_scatter"]),
        ("all_reduce", ["all_reduce"], ["all_reduce"]),
    ],
)
def test_each_direction_costs_the_collective_that_is_documented(name, forth, back):
    def body(comm):
        counted = Counted(comm)
        source = torch.ones(4, 2, requires_grad=True)
        result = OPERATIONS[name][0](source, counted, 0)
        before = [*counted.calls]
        result.sum().backward()
        return before, counted.calls[len(before) :]

    assert run(2, body) == [(forth, back)] * 2


# ---------------------------------------------------------------- what autograd does with tensors


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor * 1

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rank_without_a_gradient_takes_part_with_zeros(name):
    operation, forth, back, _ = OPERATIONS[name]

    def body(comm):
        source = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
        result = operation(source, comm, 0)
        (WithoutGradient.apply(result) if comm.rank == 1 else result * 1).sum().backward()
        return source.grad

    found = run(2, body)

    shapes = [result.shape for result in forth([torch.ones(2, 2)] * 2, 0)]
    gradients = [torch.full(shape, 1.0 - rank).double() for rank, shape in enumerate(shapes)]
    expected = back(gradients, 0)
    for rank in range(2):
        grad = torch.zeros(2, 2).double() if found[rank] is None else found[rank]
        assert torch.equal(grad, expected[rank])


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_of_two_inputs_never_share_memory_with_each_other(name):
    operation = OPERATIONS[name][0]

    def body(comm):
        first, second = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
        result = operation(first, comm, 0) + operation(second, comm, 0)
        (result * result).sum().backward()
        expected = second.grad.clone()
        first.grad.zero_()
        return torch.equal(second.grad, expected)

    assert run(2, body) == [True, True]


@pytest.mark.parametrize("name", OPERATIONS)
def test_neither_the_input_nor_a_gradient_that_others_hold_is_changed(name):
    operation = OPERATIONS[name][0]

    def body(comm):
        source = torch.full((2, 2), 1.0 + comm.rank, requires_grad=True)
        result = operation(source, comm, 0)
        bystander = torch.zeros_like(result, requires_grad=True)
        (result + bystander).sum().backward()
        return source.detach().tolist(), bystander.grad.unique().tolist()

    assert run(2, body) == [([[1.0 + rank] * 2] * 2, [1.0]) for rank in range(2)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_contiguous(name):
    operation, forth, _, _ = OPERATIONS[name]
    if forth is same:
        return

    def body(comm):
        return operation(torch.ones(2, 4, 6).transpose(0, 2), comm, 1).is_contiguous()

    assert run(2, body) == [True, True]


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, comm: replicate_to_shard(x, comm, 0), "4 is not a multiple; 3 or 6 would be"),
        (lambda x, comm: partial_to_shard(x, comm, -1), r"dim -1 of shape \(4, 5\).* 3 ranks"),
        (lambda x, comm: reduce_scatter(x, comm), "cannot be cut over the 3 ranks of 'alone'"),
        (lambda x, comm: shard_to_replicate(x, comm, 2), r"dim=2 is not a dim .*\(4, 5\)"),
        (lambda x, comm: shard_to_partial(x[0, 0], comm, 0), r"shape \(\)"),
        (lambda x, comm: broadcast(x, comm, 3), "0..2, got 3"),
        (lambda x, comm: all_to_all(x, comm), "4 rows cannot be cut equally.*input_splits"),
        (lambda x, comm: all_to_all(x, comm, [1, 1, 1], [1, 1]), "3 ranks, got \\(1, 1\\)"),
        (lambda x, comm: all_to_all(x, comm, [1, 1, 1], [5, 0, -1]), ">= 0"),
        (lambda x, comm: all_to_all(x, comm, [1, 1, 1], [1, 1, 1]), "must sum to the 4 rows"),
        (lambda x, comm: all_to_all(x, comm, None, [1, 1, 2]), "pass output_splits"),
        (lambda x, comm: all_to_all(x, Alone(1), [3], [4]), "receives what it sends"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_communication(make, message):
    with pytest.raises(UsageError, match=message):
        make(torch.ones(4, 5), Alone(3))
