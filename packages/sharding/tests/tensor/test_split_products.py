"""Products whose backward a schedule may take apart: the halves are the whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data.testing import RecordedCall, RecordingCommunicator
from trainwright.sharding.tensor import ColumnParallelLinear, Cut, SequenceSharding, enter_sequence

LENGTH = 5


class Context:
    """What a schedule gives an operation in place of autograd's context."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[torch.Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors


class Halves(TorchFunctionMode):
    """Keeps the context and the arguments of the operations that come in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Context, tuple[Any, ...]]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operation = getattr(func, "__self__", None)
        if not hasattr(operation, "weight_gradient"):
            return func(*args, **(kwargs or {}))
        needed = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        context = Context(needed)
        self.calls.append((operation, context, args))
        with torch.no_grad():
            return operation.forward(context, *args)


def _layers(
    comm: Communicator, way: str, count: int, dtype: torch.dtype = torch.float64
) -> list[ColumnParallelLinear]:
    sequence = None
    if way != "replicated":
        keeps = (
            SequenceSharding.keeping_whole if way == "whole" else SequenceSharding.keeping_shards
        )
        sequence = keeps(length=LENGTH)
    return [
        ColumnParallelLinear(
            3,
            7,
            comm,
            cut=Cut.balanced(7, comm.size),
            bias=True,
            input_is_entered=way == "entered",
            sequence=sequence,
            dtype=dtype,
        )
        for _ in range(count)
    ]


def _input(comm: Communicator, way: str) -> torch.Tensor:
    whole = _draw((2, LENGTH, 3), seed=0)
    if way != "replicated":
        whole = Cut.uneven(LENGTH, comm.size).take(whole, 1, comm.rank)
    return whole.clone().requires_grad_()


def _draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator)


def _entered(comm: Communicator, way: str, given: torch.Tensor) -> torch.Tensor:
    if way != "entered":
        return given
    return enter_sequence(given, comm, SequenceSharding.keeping_shards(length=LENGTH))


@torch.no_grad()
def _take_apart(
    halves: Halves, gradients: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, ...]]]:
    """Return all input gradients, and then all weight gradients."""
    both = list(zip(halves.calls, gradients, strict=True))
    of_inputs = [call.input_gradient(context, given)[0] for (call, context, _), given in both]
    of_weights = []
    for (operation, context, args), gradient in both:
        weights = [args[place] for place in operation.weights]
        # They may have been released since.
        context.saved_tensors = tuple(
            None if any(saved is weight for weight in weights) else saved
            for saved in context.saved_tensors
        )
        of_weights.append(operation.weight_gradient(context, gradient))
    return of_inputs, of_weights


@pytest.mark.parametrize("way", ["replicated", "shards", "whole", "entered"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_input_and_weight_gradient_together_are_the_backward(ranks: int, way: str) -> None:
    def work(world: Communicator) -> None:
        calls: list[RecordedCall] = []
        comm = RecordingCommunicator(world, calls)
        layers = _layers(comm, way, 2 if way == "entered" else 1)
        given = _input(comm, way)
        for number, layer in enumerate(layers):
            layer.weight.data = _draw(tuple(layer.weight.shape), seed=1 + number + 9 * comm.rank)
        with Halves() as halves:
            entered = _entered(comm, way, given)
            outputs = [layer(entered) for layer in layers]
        gradients = [_draw(tuple(output.shape), seed=5 + comm.rank) for output in outputs]
        calls.clear()
        found_inputs, found_weights = _take_apart(halves, gradients)
        gathers = [call for call in calls if call.operation == "all_gather"]
        assert len(gathers) == (way in ("shards", "entered"))

        entered = _entered(comm, way, given)
        entered.retain_grad()
        again = [layer(entered) for layer in layers]
        torch.autograd.backward(again, gradients)

        for output, other in zip(outputs, again, strict=True):
            torch.testing.assert_close(output, other.detach())
        torch.testing.assert_close(torch.stack(found_inputs).sum(0), entered.grad)
        for layer, (of_weight, of_bias) in zip(layers, found_weights, strict=True):
            torch.testing.assert_close(of_weight, layer.weight.grad)
            torch.testing.assert_close(of_bias, layer.bias.grad)

    LocalWorld(ranks).run(work)


@pytest.mark.parametrize("way", ["replicated", "shards", "whole", "entered"])
def test_complex_products_have_the_gradients_of_the_serial_ones(way: str) -> None:
    dtype = torch.complex128
    weight, given = _draw((7, 3), 1, dtype), _draw((2, LENGTH, 3), 2, dtype)
    gradient = _draw((2, LENGTH, 7), 3, dtype)
    serial_weight, serial_given = weight.clone().requires_grad_(), given.clone().requires_grad_()
    torch.nn.functional.linear(serial_given, serial_weight).backward(gradient)

    def work(comm: Communicator) -> None:
        rows, places = Cut.balanced(7, comm.size), Cut.uneven(LENGTH, comm.size)
        is_whole = way == "replicated"
        mine = given if is_whole else places.take(given, 1, comm.rank)
        mine = mine.clone().requires_grad_()
        [layer] = _layers(comm, way, 1, dtype)
        layer.weight.data = rows.take(weight, 0, comm.rank).clone()
        layer.bias.data.zero_()

        layer(_entered(comm, way, mine)).backward(rows.take(gradient, 2, comm.rank))

        expected = serial_given.grad if is_whole else places.take(serial_given.grad, 1, comm.rank)
        torch.testing.assert_close(mine.grad, expected)
        expected = rows.take(serial_weight.grad, 0, comm.rank)
        torch.testing.assert_close(layer.weight.grad, expected)

    LocalWorld(2).run(work)
