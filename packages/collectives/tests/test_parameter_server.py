"""Servers keep parameters and optimizer states; workers compute gradients."""

import threading
import time
from functools import partial

import pytest
import torch

from trainwright.collectives.algorithms import ParameterServer, ServedParameters, ServerRoles
from trainwright.collectives.errors import CollectiveTimeoutError, UsageError
from trainwright.collectives.local_world import LocalWorld
from trainwright.collectives.protocol import Send

SHAPES = [(3, 4), (5,), (), (2, 1)]
NUMEL = 12 + 5 + 1 + 2


class Counting:
    """A communicator of messages only, which counts the elements and messages of this rank."""

    def __init__(self, comm):
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self.name = comm.name
        self.sent, self.received = [], []
        self._comm = comm

    def exchange(self, messages, *, timeout_s=None):
        for message in messages:
            counted = self.sent if isinstance(message, Send) else self.received
            counted.append(message.tensor.numel())
        return self._comm.exchange(messages, timeout_s=timeout_s)

    def send(self, tensor, peer, *, timeout_s=None):
        self.sent.append(tensor.numel())
        return self._comm.send(tensor, peer, timeout_s=timeout_s)

    def recv(self, tensor, peer, *, timeout_s=None):
        self.received.append(tensor.numel())
        return self._comm.recv(tensor, peer, timeout_s=timeout_s)

    def reset(self):
        self.sent, self.received = [], []


def run(size, fn, *args):
    return LocalWorld(size, timeout_s=20.0).run(fn, *args)


def parameters_of(rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    return [torch.nn.Parameter(tensor) for tensor in made]


def compute_gradients(parameters, rank, step):
    """Gradients that depend on the parameters, the rank and the step; the last has none."""
    for number, parameter in enumerate(parameters[:-1]):
        parameter.grad = (parameter.detach() * (rank + 1) - step + number).sin()


adam = partial(torch.optim.Adam, lr=0.05, weight_decay=0.1)

# ---------------------------------------------------------------- synchronous


@pytest.mark.parametrize(("num_servers", "num_workers"), [(1, 1), (1, 3), (2, 2), (3, 2)])
def test_synchronous_servers_compute_what_one_process_does_with_mean_gradients(
    num_servers, num_workers
):
    num_steps = 4
    roles = ServerRoles(num_servers + num_workers, num_servers)

    def body(comm):
        if comm.rank in roles.servers:
            server = ParameterServer(comm, roles, NUMEL, torch.float64, adam)
            server.serve(num_steps - 1)
            server.serve(1)
            states = [s for s in server.optimizer.state[server.chunk].values() if s.ndim]
            return [state.numel() for state in states]
        parameters = parameters_of(comm.rank)
        served = ServedParameters(comm, roles, parameters)
        for step in range(num_steps):
            compute_gradients(parameters, comm.rank, step)
            served.step()
        return parameters

    results = run(roles.size, body)

    serial = parameters_of(roles.workers[0])
    optimizer = adam(serial)
    for step in range(num_steps):
        gradients = []
        for worker in roles.workers:
            compute_gradients(serial, worker, step)
            gradients.append([p.new_zeros(p.shape) if p.grad is None else p.grad for p in serial])
        for parameter, *parts in zip(serial, *gradients, strict=True):
            parameter.grad = sum(parts) / num_workers
        optimizer.step()
        serial[-1].grad = None
    for parameters in results[num_servers:]:
        for got, expected in zip(parameters, serial, strict=True):
            # The same additions; a vector instruction may round another element than a scalar one.
            torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)
    # Each element's two moments are on one server.
    assert [sum(moment) for moment in zip(*results[:num_servers], strict=True)] == [NUMEL, NUMEL]


@pytest.mark.parametrize(("num_servers", "num_workers"), [(1, 3), (2, 2), (4, 1)])
def test_a_servers_link_carries_its_share_for_every_worker_both_ways(num_servers, num_workers):
    roles = ServerRoles(num_servers + num_workers, num_servers)

    def body(comm):
        counting = Counting(comm)
        if comm.rank in roles.servers:
            server = ParameterServer(counting, roles, NUMEL, torch.float32, torch.optim.SGD)
            counting.reset()
            server.serve(1)
        else:
            served = ServedParameters(counting, roles, parameters_of(0, torch.float32))
            counting.reset()
            served.step()
        first = counting.sent, counting.received
        counting.reset()
        if comm.rank in roles.servers:
            server.serve_stale(1, bound=0)
        else:
            served.step()
        assert (counting.sent, counting.received) == first
        return first

    results = run(roles.size, body)

    share = NUMEL // num_servers
    for sent, received in results[:num_servers]:
        assert sent == received == [share] * num_workers
    for sent, received in results[num_servers:]:
        assert sent == received == [share] * num_servers


def test_parameters_in_bfloat16_are_updated_in_float32():
    roles = ServerRoles(2)

    def body(comm):
        if comm.rank == 0:
            make = partial(torch.optim.SGD, lr=1e-3)
            server = ParameterServer(comm, roles, 4, torch.bfloat16, make)
            server.serve(10)
            return server.chunk.detach()
        parameter = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
        served = ServedParameters(comm, roles, [parameter])
        for _ in range(10):
            parameter.grad = torch.ones_like(parameter)
            served.step()
        return parameter.detach()

    chunk, parameter = run(2, body)

    # In bfloat16, 1 - 0.001 is 1.
    torch.testing.assert_close(chunk, torch.full((4,), 0.99))
    assert torch.equal(parameter.view(-1), chunk.bfloat16())


# ---------------------------------------------------------------- bounded staleness


def slowed(bound, num_steps, patience_s):
    """Run a fast worker, and a slow one that begins only after three updates by the fast one."""
    roles = ServerRoles(3)
    fast, slow = roles.workers
    is_ahead = threading.Event()
    order = []

    def make(parameters):
        optimizer = torch.optim.SGD(parameters)
        updates = []
        optimizer.register_step_post_hook(
            lambda *_: updates.append(None) or (len(updates) == 3 and is_ahead.set())
        )
        return optimizer

    def body(comm):
        if comm.rank == 0:
            server = ParameterServer(comm, roles, 1, torch.float32, make)
            if bound is None:
                return server.serve(num_steps)
            return server.serve_stale(num_steps, bound)
        parameter = torch.zeros(1, requires_grad=True)
        served = ServedParameters(comm, roles, [parameter])
        if comm.rank == slow:
            order.append(("slow begins", is_ahead.wait(patience_s)))
        for step in range(1, num_steps + 1):
            parameter.grad = torch.ones(1)
            served.step()
            if comm.rank == fast:
                order.append(("fast", step))
        return parameter.item()

    report, *values = run(3, body)
    return report, values, order


def test_a_fast_worker_goes_on_to_the_bound_and_waits_there_for_a_slowed_one():
    report, values, order = slowed(bound=2, num_steps=5, patience_s=10.0)

    assert order[:4] == [("fast", 1), ("fast", 2), ("slow begins", True), ("fast", 3)]
    assert (report.num_updates, report.largest_lead) == (10, 2)
    assert report.num_held >= 1
    # The slow worker's first gradient has not seen the three updates before it.
    assert report.largest_lag >= 3
    # One of them has seen all ten gradients of one, at a learning rate of 0.001.
    assert min(values) == pytest.approx(-0.01)


def test_a_fast_worker_waits_for_a_slowed_one_in_every_synchronous_step():
    _, values, order = slowed(bound=None, num_steps=3, patience_s=0.2)

    assert order == [("slow begins", False), ("fast", 1), ("fast", 2), ("fast", 3)]
    assert values[0] == values[1] == pytest.approx(-0.003)


def test_no_worker_is_further_ahead_than_the_bound_allows():
    reports = []
    for bound in (0, 1, 3):
        report, _, _ = slowed_by_sleep(bound)
        assert report.num_updates == 3 * 6
        assert report.largest_lead <= bound
        reports.append(report)

    assert reports[0].num_held >= 2 * 6 - 1


def slowed_by_sleep(bound):
    roles = ServerRoles(4)
    target = torch.arange(8.0)

    def body(comm):
        if comm.rank == 0:
            make = partial(torch.optim.SGD, lr=0.3)
            return ParameterServer(comm, roles, 8, torch.float32, make).serve_stale(6, bound)
        parameter = torch.zeros(8, requires_grad=True)
        served = ServedParameters(comm, roles, [parameter])
        for _ in range(6):
            if comm.rank == 3:
                time.sleep(0.004)
            parameter.grad = parameter.detach() - target
            served.step()
        return parameter.detach()

    report, *values = run(4, body)
    return report, values, target


def test_stale_gradients_lead_to_the_minimum_as_well():
    _, values, target = slowed_by_sleep(bound=1)

    for value in values:
        assert (value - target).abs().max() < 0.5 * target.max()


def test_a_worker_that_never_comes_is_named():
    roles = ServerRoles(3)

    def body(comm):
        if comm.rank == 0:
            make = torch.optim.SGD
            server = ParameterServer(comm, roles, 2, torch.float32, make, timeout_s=0.3)
            server.serve_stale(1, bound=1)
        else:
            served = ServedParameters(comm, roles, [torch.zeros(2)])
            if comm.rank == 1:
                served.step()

    with pytest.raises(CollectiveTimeoutError, match=r"missing: ranks \[2\] .* done \[0\] of 1"):
        run(3, body)


# ---------------------------------------------------------------- mistakes


class Silent:
    """A communicator over which nothing may be said."""

    name = "silent"
    device = torch.device("cpu")

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def make_server(optimizer=torch.optim.SGD, *, rank=0, numel=4, dtype=torch.float32):
    return ParameterServer(Silent(rank, 3), ServerRoles(3, 2), numel, dtype, optimizer)


def make_worker(*parameters, rank=2, size=3):
    return ServedParameters(Silent(rank, size), ServerRoles(3, 2), parameters)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ServerRoles(3, 3), "num_servers=3 of size=3 ranks leaves no"),
        (lambda: ServerRoles(3, 0), "num_servers=0 of size=3 ranks leaves no"),
        (lambda: make_server(rank=2), r"rank 2 is none of ranks 0\.\.1; make a ServedParameters"),
        (lambda: make_server(numel=1), "1 elements cannot be cut over num_servers=2"),
        (lambda: make_server(dtype=torch.int64), "AVG of int64 would have to round"),
        (lambda: make_server(torch.optim.Adafactor), "Adafactor needs whole matrices"),
        (lambda: make_worker(torch.ones(4), rank=1), r"rank 1 is none of ranks 2\.\.2; make a Par"),
        (lambda: make_worker(torch.ones(4), size=4), "the roles are those of 3 ranks"),
        (lambda: make_worker(torch.ones(2), torch.ones(2).double()), "must be of one dtype"),
        (lambda: make_worker(torch.ones(1).expand(3)), "share memory"),
        (lambda: make_worker(torch.ones(1)), "1 elements cannot be cut"),
        (lambda: make_worker(), "must be of one dtype"),
    ],
)
def test_mistakes_are_refused_before_any_message(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_pushes_and_pulls_alternate_and_bounds_are_steps():
    roles = ServerRoles(2)

    def body(comm):
        if comm.rank == 0:
            server = ParameterServer(comm, roles, 2, torch.float32, torch.optim.SGD)
            with pytest.raises(UsageError, match="bound=-1 must be a number of steps"):
                server.serve_stale(1, bound=-1)
            return server.serve(1)
        served = ServedParameters(comm, roles, [torch.zeros(2)])
        with pytest.raises(UsageError, match="call push"):
            served.pull()
        served.push()
        with pytest.raises(UsageError, match="call pull"):
            served.push()
        return served.pull()

    run(2, body)
