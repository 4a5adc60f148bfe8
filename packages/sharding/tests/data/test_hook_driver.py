"""Weights that are gathered by module hooks are there whenever something computes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.sharding.data.hooks import HookDriver
from trainwright.sharding.data.testing_units import Tally, counting_units

Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]
F64 = torch.float64


class Block(nn.Module):
    """Two products and a sum with what came in."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, dtype=F64)
        self.down = nn.Linear(width, width, dtype=F64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(torch.tanh(self.up(hidden)))
        return hidden + added


class Stack(nn.Module):
    """Blocks between parameters of the root."""

    def __init__(self, depth: int = 4, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=F64)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.last = nn.Linear(4, 1, dtype=F64)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64) / 2)

    def forward(self, inputs: torch.Tensor, skipped: Sequence[int] = ()) -> torch.Tensor:
        hidden = self.first(inputs)
        for index, block in enumerate(self.blocks):
            if index not in skipped:
                hidden = block(hidden)
        outputs: torch.Tensor = self.last(hidden)
        return outputs


def names_of(model: nn.Module) -> list[str]:
    return [
        "",
        *(f"blocks.{index}" for index in range(len(model.get_submodule("blocks")._modules))),
    ]


def drive(
    model: nn.Module, comm: Communicator | None = None, names: Sequence[str] = (), **options: Any
) -> tuple[HookDriver, Tally]:
    comm = SingleCommunicator() if comm is None else comm
    units, tally = counting_units(model, names or names_of(model), comm)
    return HookDriver(units, model, comm, **options), tally


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def inputs_of(step: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(step), dtype=F64)


def check_like_serial(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, torch.Tensor], object],
    *,
    ranks: int = 2,
    steps: int = 3,
    names: Sequence[str] = (),
    **options: Any,
) -> list[Tally]:
    """Run some steps with and without a driver, and return what each rank gathered."""

    def run(comm: Communicator) -> Tally:
        plain, model = make(), make()
        driver, tally = drive(model, comm, names, **options)
        for number in range(steps):
            tally.gathered.clear()
            expected, computed = step(plain, inputs_of(number)), step(model, inputs_of(number))
            driver.finish()
            assert not tally.live
            torch.testing.assert_close(computed, expected, rtol=0, atol=0)
            torch.testing.assert_close(gradients(model), gradients(plain), rtol=0, atol=0)
        return tally

    tallies: list[Tally] = LocalWorld(ranks).run(run)
    return tallies


def train(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).square().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("live_units", [1, 2, 3])
def test_a_step_gathers_each_unit_twice_and_few_at_once(live_units: int) -> None:
    tallies = check_like_serial(Stack, train, live_units=live_units)

    names = names_of(Stack())
    for tally in tallies:
        assert tally.gathered == [*names, "", *names[:0:-1]]
        assert tally.most_live == live_units + 1  # the root encloses the blocks


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_release_after_forward_a_step_gathers_each_unit_once(ranks: int) -> None:
    tallies = check_like_serial(Stack, train, ranks=ranks, release_after_forward=False)

    assert [tally.gathered for tally in tallies] == [names_of(Stack())] * ranks


def test_evaluation_gathers_each_unit_once_and_releases_it() -> None:
    def evaluate(model: nn.Module, inputs: torch.Tensor) -> object:
        with torch.no_grad():
            return model(inputs)

    for keep in (True, False):
        tallies = check_like_serial(Stack, evaluate, release_after_forward=not keep)
        assert [tally.gathered for tally in tallies] == [names_of(Stack())] * 2
        assert [tally.most_live for tally in tallies] == [3, 3]


def test_several_forwards_may_wait_for_their_backwards() -> None:
    def step(model: nn.Module, inputs: torch.Tensor) -> None:
        losses = [model(inputs + shift).square().sum() for shift in range(3)]
        for loss in losses:
            loss.backward()

    check_like_serial(Stack, step)
    kept = check_like_serial(Stack, step, release_after_forward=False)

    assert [tally.gathered for tally in kept] == [names_of(Stack())] * 2


def test_one_backward_may_serve_several_forwards() -> None:
    def step(model: nn.Module, inputs: torch.Tensor) -> None:
        (model(inputs).sum() * model(inputs + 1).square().sum()).backward()

    for tally in check_like_serial(Stack, step):
        assert len(tally.gathered) == 2 * 5 + 2 * 5
        assert tally.most_live == 3


def test_a_graph_may_be_run_backward_twice() -> None:
    def step(model: nn.Module, inputs: torch.Tensor) -> None:
        loss = model(inputs).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    check_like_serial(Stack, step)
    check_like_serial(Stack, step, release_after_forward=False)


def test_gradients_may_be_differentiated_again() -> None:
    def step(model: nn.Module, inputs: torch.Tensor) -> None:
        inputs.requires_grad_()
        (gradient,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        gradient.square().sum().backward()

    check_like_serial(Stack, step)
    check_like_serial(Stack, step, release_after_forward=False)


class Force(Stack):
    """Differentiates within its forward."""

    def forward(self, inputs: torch.Tensor, skipped: Sequence[int] = ()) -> torch.Tensor:
        inputs = inputs.detach().requires_grad_()
        energy = super().forward(inputs).square().sum()
        (force,) = torch.autograd.grad(energy, inputs, create_graph=True)
        return force


def test_a_forward_may_run_a_backward_of_its_own() -> None:
    check_like_serial(Force, train)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_checkpoints_around_units_run_them_again(reentrant: bool, size: int) -> None:
    class Checkpointed(Stack):
        def forward(self, inputs: torch.Tensor, skipped: Sequence[int] = ()) -> torch.Tensor:
            hidden = self.first(inputs)
            for start in range(0, 4, size):
                part = nn.Sequential(*self.blocks[start : start + size])
                hidden = checkpoint(part, hidden, use_reentrant=reentrant)
            outputs: torch.Tensor = self.last(hidden)
            return outputs

    for tally in check_like_serial(Checkpointed, train):
        assert len(tally.gathered) == 10
        assert tally.most_live <= 2 + size + 1
