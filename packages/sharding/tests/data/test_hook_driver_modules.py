"""Whatever a module does with its inputs, weights and outputs, its weights are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data.hooks import HookDriver
from trainwright.sharding.data.testing_units import Tally, counting_units

F64 = torch.float64


def linear() -> nn.Linear:
    return nn.Linear(3, 3, dtype=F64)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(3, 3, dtype=F64))


class Attributes:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


@attrs.frozen
class Slots:
    hidden: torch.Tensor


class Named(NamedTuple):
    hidden: torch.Tensor


class Returns(nn.Module):
    """Returns its output in a container, and takes it as a keyword."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any], unwrap: Callable[[Any], torch.Tensor]):
        super().__init__()
        self.root = weight()
        self.unit = linear()
        self.inner = _Wrapped(wrap)
        self.unwrap = unwrap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.unwrap(self.inner(hidden=torch.tanh(self.unit(hidden)))) @ self.root


class _Wrapped(nn.Module):
    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = linear()
        self.wrap = wrap

    def forward(self, *, hidden: torch.Tensor) -> Any:
        return self.wrap(self.linear(hidden))


class Unit(nn.Module):
    """Runs a function of its weight."""

    def __init__(self, run: Callable[[Any, torch.Tensor], Any], frozen: bool = False) -> None:
        super().__init__()
        self.weight = weight()
        self.second = weight()
        self.run = run
        self.second.requires_grad_(not frozen)

    def forward(self, hidden: torch.Tensor, *others: torch.Tensor) -> Any:
        return self.run(self, hidden, *others)


class Pair(nn.Module):
    """Two units, the first between two functions."""

    def __init__(
        self,
        run: Callable[..., Any],
        after: Callable[[Any, Any], torch.Tensor] = lambda model, hidden: hidden,
        before: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.unit = Unit(run, frozen)
        self.inner = Unit(lambda unit, hidden: F.linear(hidden, unit.weight) @ unit.second)
        self.root = weight()
        self.before = before
        self.after = after

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.before(self.inner(hidden @ self.root))
        return self.after(self, self.unit(hidden))


def product(unit: Any, hidden: torch.Tensor) -> torch.Tensor:
    return torch.tanh(hidden @ unit.weight) @ unit.second


def into_attribute(unit: Any, hidden: torch.Tensor) -> torch.Tensor:
    outputs = hidden * 2
    unit.loss = (hidden @ unit.weight).square().sum()  # runs backward before the output does
    return outputs


def into_input(unit: Any, hidden: torch.Tensor) -> None:
    hidden.mul_(2).add_(product(unit, hidden.detach().clone()))


def with_view_of_input(unit: Any, hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden.view(-1)
    hidden[:3].mul_(unit.weight[0])
    return hidden.view(-1, 3)


CASES: dict[str, Callable[[], nn.Module]] = {
    "a dictionary": lambda: Returns(lambda h: {"a": [h]}, lambda out: out["a"][0]),
    "a named tuple": lambda: Returns(Named, lambda out: out.hidden),
    "an object": lambda: Returns(Attributes, lambda out: out.hidden),
    "an object with slots": lambda: Returns(Slots, lambda out: out.hidden),
    "an output changed in place": lambda: Pair(product, lambda _, h: h.mul_(2).tanh_()),
    "a view of the output changed in place": lambda: Pair(product, lambda _, h: h.T.mul_(2).exp()),
    "a view as output, changed in place": lambda: Pair(
        lambda unit, h: product(unit, h).T.reshape(3, -1).t(), lambda _, h: h.add_(1).tanh_()
    ),
    "several outputs, changed in place": lambda: Pair(
        lambda unit, h: product(unit, h).split(1, -1), lambda _, parts: parts[0] * parts[2]
    ),
    "a detached weight": lambda: Pair(
        lambda unit, h: (h @ unit.weight.detach()).tanh() * (h @ unit.second)
    ),
    "a frozen weight": lambda: Pair(product, frozen=True),
    "a weight used only for other weights": lambda: Pair(
        lambda unit, h: h @ (unit.weight * unit.second.exp()),
        before=lambda h: h.detach().requires_grad_(),
    ),
    "a weight as output": lambda: Pair(
        lambda unit, h: unit.weight, lambda model, w: torch.tanh(w) * w
    ),
    "a view of a weight as output": lambda: Pair(
        lambda unit, h: [h @ unit.second, unit.weight.detach()[:2]],
        lambda model, outs: outs[0][:2] * outs[1],
    ),
    "nothing differentiable as output": lambda: Pair(
        lambda unit, h: (h @ unit.weight).detach(), lambda model, h: h * model.root[0]
    ),
    "its input as output": lambda: Pair(
        lambda unit, h: h, lambda model, h: h.exp_(), before=lambda h: h + 1
    ),
    "no differentiable input": lambda: Pair(product, before=lambda h: h.detach()),
    "an unused weight": lambda: Pair(lambda unit, h: h @ unit.weight),
    "an input changed in place": lambda: Pair(
        lambda unit, h: product(unit, h.mul_(2)), before=lambda h: h + 1
    ),
    "a result written into its input": lambda: _WritesIntoInput(into_input),
    "a result written into a view of its input": lambda: _WritesIntoInput(with_view_of_input),
    "a loss in an attribute": lambda: Pair(
        into_attribute, lambda model, h: h * model.unit.loss.exp().clamp(max=2)
    ),
    "autocast": lambda: _Autocast(product),
    "a checkpoint inside": lambda: Pair(
        lambda unit, h: checkpoint(lambda x: product(unit, x), h, use_reentrant=False)
    ),
}


class _WritesIntoInput(Pair):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(hidden @ self.root)) + 1
        self.unit(hidden)
        return hidden.exp()


class _Autocast(Pair):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__(run)
        self.float()  # float64 is left as it is

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = super().forward(hidden.float())
        assert output.dtype == torch.bfloat16
        return output


def train_alike(
    make: Callable[[], nn.Module], names: list[str], *, ranks: int = 1, **options: Any
) -> list[Tally]:
    """Compare three steps of a driven model with those of a plain one."""

    def run(comm: Communicator) -> Tally:
        plain, model = make(), make()
        model.load_state_dict(plain.state_dict())
        units, tally = counting_units(model, names, comm)
        driver = HookDriver(units, model, comm, **options)
        for step in range(3):
            tally.gathered.clear()
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step), dtype=F64)
            for trained in (plain, model):
                trained.zero_grad()
                trained(inputs.clone()).square().sum().backward()
            driver.finish()
            for (name, mine), other in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0, msg=name)
            assert not tally.live
        return tally

    tallies: list[Tally] = LocalWorld(ranks).run(run)
    return tallies


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("case", list(CASES))
def test_a_unit_may_have(case: str, keep: bool) -> None:
    train_alike(CASES[case], ["", "inner", "unit"], release_after_forward=not keep)


class Shared(nn.Module):
    """Calls each block twice, in a round."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linear() for _ in range(depth))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, *self.blocks]:
            hidden = torch.tanh(block(hidden))
        return hidden


@pytest.mark.parametrize("depth", [1, 2])
def test_a_unit_may_run_several_times_in_a_forward(depth: int) -> None:
    names = [f"blocks.{index}" for index in range(depth)]

    (tally,) = train_alike(lambda: Shared(depth), names)

    assert tally.gathered == [*names, *names, *names[::-1], *names[::-1]]


class Nest(nn.Module):
    """A unit of two units, and one beside it."""

    def __init__(self, inside: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = weight()
        self.a = linear()
        self.b = inside or nn.Linear(3, 3, dtype=F64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.a(hidden @ self.weight))
        return hidden + self.b(hidden @ self.weight)


@pytest.mark.parametrize("live_units", [1, 2, 3])
def test_units_inside_of_units_are_gathered_besides_those(live_units: int) -> None:
    names = ["", "a", "b", "b.a", "b.b"]

    (tally,) = train_alike(lambda: Nest(Nest()), names, live_units=live_units)

    assert tally.gathered == [*names, "", "b", "b.b", "b.a", "a"]
    assert tally.most_live <= 2 + live_units


class Decoder(nn.Module):
    """Every layer reads one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = linear()
        self.layers = nn.ModuleList(Unit(lambda u, h, m: h + (m @ u.weight) * h) for _ in range(5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        memory = torch.tanh(self.encoder(hidden))
        for layer in self.layers:
            hidden = layer(hidden, memory)
        return hidden


def test_an_input_that_all_units_share_does_not_keep_them() -> None:
    names = ["encoder", *(f"layers.{index}" for index in range(5))]

    (tally,) = train_alike(Decoder, names)

    assert len(tally.gathered) == 12
    assert tally.most_live == 2
