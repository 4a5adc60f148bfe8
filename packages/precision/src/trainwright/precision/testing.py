"""Laws that every loss scaler keeps, and strategies to draw training sequences."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

from trainwright.collectives import Communicator, LocalWorld, ReduceOp
from trainwright.precision.errors import ScalerOrderError
from trainwright.precision.protocol import LossScaler

MakeScaler = Callable[[Communicator | None], LossScaler]
"""Makes a scaler of the implementation under test for the ranks of a communicator."""


@attrs.frozen
class Sequence:
    """Steps of one scalar weight: the true gradient of each, or a non-finite one.

    Args:
        gradients: the gradient of each step, exact in float32 at any power-of-two scale.
        rank: the only rank whose gradient is non-finite where it is, of ``num_ranks``.
        num_ranks: ranks that train together.
    """

    gradients: tuple[float, ...]
    rank: int
    num_ranks: int

    def on_rank(self, rank: int, step: int) -> float:
        """Return the gradient of ``rank`` at ``step``."""
        gradient = self.gradients[step]
        return gradient if is_finite(gradient) or rank == self.rank else 1.0


def gradients() -> st.SearchStrategy[float]:
    """Draw gradients: small exact numbers, zero, and now and then infinity or NaN."""
    finite = st.integers(-64, 64).map(lambda n: n / 16)
    bad = st.sampled_from([float("inf"), float("-inf"), float("nan")])
    return st.one_of(finite, finite, finite, bad)


@st.composite
def sequences(draw: st.DrawFn, max_steps: int = 8, max_ranks: int = 3) -> Sequence:
    """Draw a sequence of training steps on one to ``max_ranks`` ranks."""
    num_ranks = draw(st.integers(1, max_ranks))
    steps = draw(st.lists(gradients(), min_size=1, max_size=max_steps))
    return Sequence(tuple(steps), draw(st.integers(0, num_ranks - 1)), num_ranks)


def is_finite(value: float) -> bool:
    """Say whether ``value`` is neither infinite nor NaN."""
    return abs(value) < float("inf")


def train_step(
    scaler: LossScaler, weight: torch.Tensor, optimizer: torch.optim.Optimizer, gradient: float
) -> bool:
    """Run one iteration of PyTorch's loop with the given true gradient."""
    optimizer.zero_grad()
    scaler.scale((weight * gradient).sum()).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    applied = scaler.step(optimizer)
    scaler.update()
    return applied


def weight_and_optimizer() -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """Return a weight of two elements and the SGD with momentum that trains it."""
    weight = torch.nn.Parameter(torch.ones(2))
    return weight, torch.optim.SGD([weight], lr=0.125, momentum=0.5)


def law_finite_steps_compute_what_they_compute_without_a_scaler(
    make: MakeScaler, sequence: Sequence
) -> None:
    """Scaling and unscaling cancel exactly, and non-finite steps change nothing."""
    weight, optimizer = weight_and_optimizer()
    plain, plain_optimizer = weight_and_optimizer()
    scaler = make(None)
    for gradient in sequence.gradients:
        applied = train_step(scaler, weight, optimizer, gradient)
        if is_finite(gradient):
            plain_optimizer.zero_grad()
            (plain * gradient).sum().backward()  # type: ignore[no-untyped-call]
            plain_optimizer.step()
        assert applied == is_finite(gradient)
        assert torch.equal(weight, plain)


def law_gradients_are_unscaled_exactly_once(make: MakeScaler, sequence: Sequence) -> None:
    """A second ``unscale_`` raises and leaves the gradient as the first one made it."""
    weight, optimizer = weight_and_optimizer()
    scaler = make(None)
    scaler.scale((weight * 3.0).sum()).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    for attempt in (scaler.unscale_, lambda _: scaler.scale(weight.sum())):
        try:
            attempt(optimizer)
        except ScalerOrderError:
            continue
        raise AssertionError("gradients were about to be unscaled twice, or mixed")
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2,), 3.0))


def law_all_losses_of_an_iteration_get_the_same_scale(make: MakeScaler, sequence: Sequence) -> None:
    """Auxiliary losses are multiplied by what the main loss is multiplied by."""
    scaler = make(None)
    losses = [scaler.scale(torch.tensor(1.0, dtype=t)) for t in (torch.float32, torch.float64)]
    assert {float(loss) for loss in losses} == {scaler.get_scale()}
    assert torch.equal(scaler.unscaled(losses[0]), torch.tensor(1.0))


def law_all_ranks_take_the_same_decision(make: MakeScaler, sequence: Sequence) -> None:
    """One rank's non-finite gradient skips the step of every rank and moves every scale alike."""

    def train(communicator: Communicator) -> list[tuple[bool, dict[str, Any], list[float]]]:
        weight, optimizer = weight_and_optimizer()
        scaler = make(communicator)
        trace = []
        for step in range(len(sequence.gradients)):
            gradient = sequence.on_rank(communicator.rank, step)
            applied = train_step(scaler, weight, optimizer, gradient)
            trace.append((applied, scaler.state_dict(), weight.tolist()))
        return trace

    traces = LocalWorld(sequence.num_ranks).run(train)
    verdicts = [applied for applied, _, _ in traces[0]]
    assert verdicts == [is_finite(gradient) for gradient in sequence.gradients]
    assert all(trace == traces[0] for trace in traces)


def law_a_given_count_decides_without_search_or_communication(
    make: MakeScaler, sequence: Sequence
) -> None:
    """A count that all ranks share is believed, also against what the gradients look like."""
    counts: list[Any] = [0, torch.tensor(0.0), 2, torch.tensor(1), torch.tensor(float("nan"))]
    weight, optimizer = weight_and_optimizer()
    scaler = make(LonelyCommunicator())
    for count, wanted in zip(counts, [True, True, False, False, False], strict=True):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer, non_finite=count)
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.ones(2))
        assert scaler.step(optimizer) == wanted
        scaler.update()


def law_the_state_survives_json_and_runs_no_step(make: MakeScaler, sequence: Sequence) -> None:
    """A scaler that resumes from the state goes on as the one that was never interrupted."""
    half = len(sequence.gradients) // 2
    weight, optimizer = weight_and_optimizer()
    scaler = make(None)
    for gradient in sequence.gradients[:half]:
        train_step(scaler, weight, optimizer, gradient)
    before = weight.detach().clone()
    resumed = make(None)
    resumed.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert torch.equal(weight, before)
    assert resumed.state_dict() == scaler.state_dict()
    other, other_optimizer = weight_and_optimizer()
    for gradient in sequence.gradients[half:]:
        assert train_step(scaler, weight, optimizer, gradient) == train_step(
            resumed, other, other_optimizer, gradient
        )
        assert resumed.state_dict() == scaler.state_dict()


class LonelyCommunicator:
    """Rank 0 of two whose peer never answers: any communication is an error."""

    rank = 0
    size = 2
    name = "lonely"
    device = torch.device("cpu")

    def __getattr__(self, operation: str) -> Any:
        """Fail on every operation of a communicator."""
        raise AssertionError(f"nothing should be communicated, but {operation} was called")


@attrs.define
class CountingCommunicator:
    """A communicator of one that counts its all-reduces."""

    num_all_reduces: int = 0
    num_bytes: int = 0
    rank: int = 0
    size: int = 1
    name: str = "counting"
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Any:
        """Count the call and leave the tensor as it is."""
        self.num_all_reduces += 1
        self.num_bytes += tensor.numel() * tensor.element_size()
        return _Done()


class _Done:
    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""


LOSS_SCALER_LAWS: tuple[Callable[[MakeScaler, Sequence], None], ...] = (
    law_finite_steps_compute_what_they_compute_without_a_scaler,
    law_gradients_are_unscaled_exactly_once,
    law_all_losses_of_an_iteration_get_the_same_scale,
    law_all_ranks_take_the_same_decision,
    law_a_given_count_decides_without_search_or_communication,
    law_the_state_survives_json_and_runs_no_step,
)
"""Call each with a maker of scalers whose scale is a power of two, and a drawn sequence."""
