"""Compilers, exceptions and changes of course leave every weight where it belongs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.sharding.data import LifecycleError
from trainwright.sharding.data.hooks import HookDriver
from trainwright.sharding.data.testing_units import Tally, counting_units

F64 = torch.float64


class Tanh(nn.Module):
    """A product, and an error on request."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=F64)
        self.fails: str | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(hidden))
        if self.fails == "forward":
            raise MemoryError("in a forward")
        if self.fails == "interrupt":
            raise KeyboardInterrupt
        if self.fails == "backward":
            hidden.register_hook(self.fail)
        return hidden

    def fail(self, gradient: torch.Tensor) -> None:
        raise MemoryError("in a backward")


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=F64))
        self.blocks = nn.ModuleList(Tanh() for _ in range(3))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def names_of(*, compiled: bool = False) -> list[str]:
    return ["", *(f"blocks.{i}{'._orig_mod' * compiled}" for i in range(3))]


def drive(
    model: nn.Module,
    comm: Communicator | None = None,
    names: list[str] | None = None,
    **options: Any,
) -> tuple[HookDriver, Tally]:
    comm = SingleCommunicator() if comm is None else comm
    units, tally = counting_units(model, names or names_of(), comm)
    return HookDriver(units, model, comm, **options), tally


def train(model: nn.Module, step: int = 0) -> None:
    inputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(step), dtype=F64)
    model(inputs).square().sum().backward()


def check_trains(model: nn.Module, driver: HookDriver, tally: Tally) -> None:
    """Check that from now on a driven `Chain` has the gradients of a plain one."""
    plain = Chain()
    for step in range(2):
        for trained in (plain, model):
            trained.zero_grad()
            train(trained, step)
        driver.finish()
        assert not tally.live
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)


Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Any]


def leave(model: Chain, backend: Backend) -> nn.Module:
    return model


def units_in_place(model: Chain, backend: Backend) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def units(model: Chain, backend: Backend) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)  # type: ignore[assignment]
    return model


def whole(model: Chain, backend: Backend) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend=backend)  # type: ignore[assignment]
    return compiled


def whole_in_place(model: Chain, backend: Backend) -> nn.Module:
    model.compile(backend=backend)
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it
@pytest.mark.parametrize(
    ("before", "names", "after"),
    [
        (leave, names_of(), units_in_place),
        (leave, names_of(), whole),
        (leave, names_of(), whole_in_place),
        (units, names_of(), leave),
        (units, names_of(compiled=True), leave),
    ],
)
def test_compilers_and_hooks_leave_each_other_alone(
    before: Callable[[Chain, Backend], nn.Module],
    names: list[str],
    after: Callable[[Chain, Backend], nn.Module],
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    plain, model = Chain(), Chain()
    before(model, count)
    driver, tally = drive(model, names=names)
    compiled = after(model, count)
    num_graphs = []
    with torch.autograd.set_multithreading_enabled(False):
        for step in range(3):
            train(plain, step)
            train(compiled, step)
            driver.finish()
            num_graphs.append(len(graphs))

    assert tally.most_live == 3
    assert num_graphs[0] == num_graphs[-1] > 0  # gathering does not make it compile again
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)


@pytest.mark.parametrize("where", ["forward", "backward", "interrupt"])
@pytest.mark.parametrize("reset", [False, True])
def test_after_an_exception_on_all_ranks_training_goes_on(where: str, reset: bool) -> None:
    def run(comm: Communicator) -> None:
        model = Chain()
        driver, tally = drive(model, comm)
        train(model)
        driver.finish()
        model.blocks[1].fails = where
        with pytest.raises((MemoryError, KeyboardInterrupt)):
            train(model)
        model.blocks[1].fails = None
        if reset:
            driver.reset()
            assert not tally.live
        check_trains(model, driver, tally)

    LocalWorld(2).run(run)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_on_one_rank_a_reset_on_all_lets_training_go_on(
    where: str, first: bool
) -> None:
    def run(comm: Communicator) -> None:
        model = Chain()
        driver, tally = drive(model, comm)
        if not first:
            train(model)
            driver.finish()
        if comm.rank == 1:
            model.blocks[1].fails = where
            with pytest.raises(MemoryError):
                train(model)
            model.blocks[1].fails = None
        else:
            train(model)
        driver.reset()
        assert not tally.live
        check_trains(model, driver, tally)

    LocalWorld(2).run(run)


def test_an_exception_in_a_forward_releases_what_it_was_in() -> None:
    model = Chain()
    _, tally = drive(model, live_units=1)
    model.blocks[1].fails = "forward"

    with pytest.raises(MemoryError):
        train(model)

    assert not tally.live


def test_a_view_of_a_weight_that_cannot_be_copied_is_refused() -> None:
    class Holder:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Returns(Tanh):
        def forward(self, hidden: torch.Tensor) -> Any:
            return Holder(self.linear.weight[0])

    model = Returns()
    drive(model, names=[""])

    with pytest.raises(LifecycleError, match=r"inside of a Holder.*\.clone\(\)"):
        model(torch.ones(1, 3, dtype=F64))
