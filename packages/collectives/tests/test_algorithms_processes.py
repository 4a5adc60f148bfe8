"""Algorithms between real processes over Gloo, where messages take time and wait for no step.

Starting processes is slow, so three of them run all the sections below one after the other, and a
test asks for each whether it was finished.
"""

from collections.abc import Callable

import pytest
import torch
import torch._dynamo  # which optimizers need: once, before ranks are forked

from trainwright.collectives import ReduceOp, TorchCommunicator, algorithms
from trainwright.collectives.algorithms import ParameterServer, ServedParameters, ServerRoles
from trainwright.collectives.testing import run_processes

pytestmark = pytest.mark.processes

ALL_REDUCES = [
    algorithms.direct_all_reduce,
    algorithms.master_worker_all_reduce,
    algorithms.ring_all_reduce,
    algorithms.bidirectional_ring_all_reduce,
    algorithms.tree_all_reduce,
    algorithms.double_tree_all_reduce,
    algorithms.halving_doubling_all_reduce,
]


@pytest.fixture(scope="module")
def kept() -> list[list[str]]:
    """Run all sections in three processes; return the names of those that each has finished."""
    return run_processes(run_sections, 3, timeout_s=120.0)


def run_sections(comm: TorchCommunicator) -> list[str]:
    finished = []
    for section in SECTIONS:
        section(comm)
        finished.append(section.__name__)
    return finished


def tensor_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(numel) * 7 + rank * 5) % 11 - 5).to(dtype)


def every_all_reduce_equals_the_communicators_own(comm: TorchCommunicator) -> None:
    for numel, dtype in ((1, torch.float32), (70_001, torch.bfloat16), (300_000, torch.float64)):
        own = tensor_of(comm.rank, numel, dtype)
        comm.all_reduce(own, ReduceOp.AVG).wait()
        for reduce in ALL_REDUCES:
            tensor = tensor_of(comm.rank, numel, dtype)
            reduce(comm, tensor, ReduceOp.AVG)
            assert torch.equal(tensor, own), reduce


def trees_of_many_chunks_equal_the_communicators_own(comm: TorchCommunicator) -> None:
    own = tensor_of(comm.rank, 9_999, torch.float32)
    comm.all_reduce(own).wait()
    for reduce in (algorithms.tree_all_reduce, algorithms.double_tree_all_reduce):
        tensor = tensor_of(comm.rank, 9_999, torch.float32)
        reduce(comm, tensor, num_chunks=17)
        assert torch.equal(tensor, own), reduce


def a_hierarchy_of_process_groups_reduces_over_all(comm: TorchCommunicator) -> None:
    for ranks_per_node in (1, 3):
        node, across = algorithms.split_by_nodes(comm, ranks_per_node)
        own = tensor_of(comm.rank, 5_001, torch.float32)
        comm.all_reduce(own).wait()
        tensor = tensor_of(comm.rank, 5_001, torch.float32)
        algorithms.hierarchical_all_reduce(node, across, tensor)
        assert torch.equal(tensor, own)


def a_server_serves_both_ways(comm: TorchCommunicator) -> None:
    roles = ServerRoles(3)
    if comm.rank in roles.servers:
        server = ParameterServer(comm, roles, 1000, torch.float32, torch.optim.SGD)
        server.serve(2)
        report = server.serve_stale(3, bound=1)
        assert report.num_updates == 6
        assert report.largest_lead <= 1
        torch.testing.assert_close(server.chunk.detach(), torch.full((1000,), -8e-3))
        return
    parameter = torch.zeros(1000, requires_grad=True)
    served = ServedParameters(comm, roles, [parameter])
    parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        served.step()
    torch.testing.assert_close(parameter.detach(), torch.full((1000,), -2e-3))
    for _ in range(3):
        served.step()


SECTIONS: list[Callable[[TorchCommunicator], None]] = [
    every_all_reduce_equals_the_communicators_own,
    trees_of_many_chunks_equal_the_communicators_own,
    a_hierarchy_of_process_groups_reduces_over_all,
    a_server_serves_both_ways,
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_between_processes(section: Callable[..., None], kept: list[list[str]]) -> None:
    assert all(section.__name__ in finished for finished in kept)
