"""All-to-all by messages: plans, results, traffic, and when it is worth a detour through a node."""

from functools import partial

import pytest
import torch

from trainwright.collectives import LocalWorld, Recorded, SingleCommunicator, UsageError, algorithms
from trainwright.collectives.algorithms import (
    Part,
    Payload,
    all_reduce_by,
    all_to_all_by,
    direct_all_to_all,
    direct_all_to_all_plan,
    hierarchical_all_to_all,
    hierarchical_all_to_all_plan,
    split_by_nodes,
    verify_plans,
)
from trainwright.collectives.cost import best
from trainwright.collectives.protocol import Send
from trainwright.collectives.topology import preset

# Nodes and ranks a node, for every world of one to nine ranks.
SHAPES = [(n // d, d) for n in range(1, 10) for d in range(1, n + 1) if n % d == 0]


class Counter:
    """A communicator that counts the messages of every exchange."""

    def __init__(self, comm):
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self.sends = []
        self._comm = comm

    def exchange(self, messages):
        self.sends += [message for message in messages if isinstance(message, Send)]
        return self._comm.exchange(messages)

    def counts(self):
        return len(self.sends), sum(message.tensor.numel() for message in self.sends)


def parts_of(rank, size, each, dtype=torch.int64):
    return (torch.arange(size * each) + 1000 * rank).to(dtype)


@pytest.mark.parametrize(("nodes", "each"), SHAPES)
def test_every_part_reaches_its_rank_once_by_the_planned_messages(nodes, each):
    n, m, d = nodes * each, nodes, each
    direct = [direct_all_to_all_plan(n, rank) for rank in range(n)]
    hierarchical = [hierarchical_all_to_all_plan(n, rank, d) for rank in range(n)]

    verify_plans(direct)
    verify_plans(hierarchical)

    assert {len(plan.steps) for plan in hierarchical} == {(d > 1) + (m > 1)}
    # A rank's tensor has n parts of 5 elements; the plan counts those of all ranks.
    own = 5 * n
    assert {plan.num_sent(n * own) for plan in direct} == {(n - 1) * own // n}
    assert {plan.num_sent(n * own) for plan in hierarchical} == {
        (d - 1) * own // d + (m - 1) * own // m
    }
    assert {plan.num_messages for plan in hierarchical} == {d - 1 + m - 1}


@pytest.mark.parametrize(("nodes", "each"), SHAPES)
def test_the_result_is_the_communicators_and_the_traffic_that_of_the_formula(nodes, each):
    n, m, d = nodes * each, nodes, each
    own = 6 * n

    def body(comm):
        source = parts_of(comm.rank, n, 6)
        expected = torch.empty_like(source)
        comm.all_to_all(expected, source).wait()
        node, across = map(Counter, split_by_nodes(comm, d))
        found, direct, counter = torch.zeros_like(source), torch.zeros_like(source), Counter(comm)
        hierarchical_all_to_all(node, across, found, source)
        direct_all_to_all(counter, direct.view(2 * n, 3), source.view(2 * n, 3))
        assert torch.equal(found, expected)
        assert torch.equal(direct, expected)
        assert torch.equal(source, parts_of(comm.rank, n, 6))
        assert node.counts() == (d - 1, (d - 1) * own // d)
        assert across.counts() == (m - 1, (m - 1) * own // m)
        assert counter.counts() == (n - 1, (n - 1) * own // n)
        nothing = torch.empty(0)
        hierarchical_all_to_all(node, across, nothing, nothing.clone())

    LocalWorld(n, timeout_s=20.0).run(body)


def test_any_dtype_and_strides_travel_and_a_recorded_world_agrees():
    def body(comm):
        recorded = Recorded(comm)
        for dtype in (torch.bool, torch.bfloat16, torch.complex64):
            source = (parts_of(comm.rank, 4, 2) % 3).to(dtype).view(2, 4).T
            found, expected = torch.empty(2, 4, dtype=dtype), torch.empty(8, dtype=dtype)
            comm.all_to_all(expected, source.reshape(-1)).wait()
            hierarchical_all_to_all(*split_by_nodes(recorded, 2), found, source)
            assert torch.equal(found.view(-1), expected)

    LocalWorld(4).run(body)


def test_one_rank_alone_copies():
    comm, found = SingleCommunicator(), torch.empty(3)

    direct_all_to_all(comm, found, torch.arange(3.0))

    assert found.tolist() == [0.0, 1.0, 2.0]


def test_a_detour_through_the_node_is_worth_it_where_messages_across_are_many_and_small():
    cluster = preset("h100", 16)

    assert best("all_to_all", 2**14, cluster).algorithm == "hierarchical"
    assert best("all_to_all", 2**34, preset("h100")).algorithm == "direct"


def test_a_part_that_takes_the_wrong_turn_is_found():
    plans = [hierarchical_all_to_all_plan(4, rank, 2) for rank in range(4)]

    swapped = Part(1, 1, 2, Payload.RESULT, 2, 1)
    steps = (algorithms.Step((swapped,), plans[0].steps[0].receives), *plans[0].steps[1:])
    plans[0] = algorithms.Plan("turned", 0, 4, steps, 16, 1, (0, 4), (0, 13), 0)
    with pytest.raises(UsageError, match=r"chunks 1\.\.2 and 1 times 1 further, is not what"):
        verify_plans(plans)
    plans = [hierarchical_all_to_all_plan(4, rank, 2) for rank in range(4)]
    plans[2] = algorithms.Plan("late", 2, 4, plans[2].steps, 16, 1, (8, 12), (3, 16))
    with pytest.raises(UsageError, match="rank 2 of 4 ends without the result of chunk 3"):
        verify_plans(plans)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (partial(direct_all_to_all, output=torch.empty(5), input=torch.ones(5)), "must divide"),
        (partial(direct_all_to_all, output=torch.empty(4), input=torch.ones(6)), "as many"),
        (partial(direct_all_to_all, output=torch.empty(2), input=torch.ones(2).int()), "alike"),
        (
            partial(direct_all_to_all, output=torch.empty(4, 2)[:, 0], input=torch.ones(4)),
            "contiguous",
        ),
        (
            lambda comm: direct_all_to_all(comm, *[torch.ones(4)] * 2),
            "overlap",
        ),
        (
            lambda comm: all_to_all_by(
                algorithms.direct_all_gather_plan(2, comm.rank), comm, torch.ones(2), torch.ones(2)
            ),
            "not that of an all-to-all",
        ),
        (
            lambda comm: all_reduce_by(direct_all_to_all_plan(2, comm.rank), comm, torch.ones(4)),
            "run it by all_to_all_by",
        ),
        (lambda comm: hierarchical_all_to_all_plan(2, comm.rank, 3), "ranks_per_node=3 must"),
        (lambda comm: direct_all_to_all_plan(2, 2), "rank=2 is not one of 2"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_before_any_message(act, message):
    def body(comm):
        counter = Counter(comm)
        with pytest.raises(UsageError, match=message):
            act(counter)
        assert counter.sends == []

    LocalWorld(2).run(body)
