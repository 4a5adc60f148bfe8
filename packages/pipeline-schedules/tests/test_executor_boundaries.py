"""What may cross from stage to stage, and that it crosses whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, Work
from trainwright.pipeline_schedules import interleaved_1f1b, one_f_one_b
from trainwright.pipeline_schedules.execute import (
    BoundaryError,
    BoundarySpec,
    PipelineExecutor,
    TensorSpec,
)
from trainwright.pipeline_schedules.execute.boundary import Crossing, Form
from trainwright.pipeline_schedules.execute.header import (
    FIRST_INTS,
    decode,
    encode,
    missing_ints,
)
from trainwright.pipeline_schedules.execute.testing import serial_step

F64 = torch.float64


class Stage(nn.Module):
    """Any function of a weight and the boundary arguments."""

    def __init__(self, function: Callable[..., Any], stage: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.weight = nn.Parameter(torch.randn(3, 3, generator=generator, dtype=F64))
        self.function = function

    def forward(self, *boundary: Any, **inputs: Any) -> Any:
        return self.function(self.weight, *boundary, **inputs)


class Counting:
    """A transport that counts messages and the bytes of them."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self.sent: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        assert tensor.is_contiguous()
        self.sent.append(tensor.clone())
        return self.comm.send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        return self.comm.recv(tensor, peer, tag)

    def abort(self, cause: BaseException | str) -> None:
        self.comm.abort(cause)


def start(stage: int, microbatch: int) -> Mapping[str, Any]:
    if stage > 0:
        return {}
    generator = torch.Generator().manual_seed(microbatch)
    return {"x": torch.randn(2, 3, generator=generator, dtype=F64)}


def total(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


Functions = tuple[Callable[..., Any], ...]


def run_stages(
    functions: Functions, *, steps: int = 1, microbatches: int = 3, **options: Any
) -> tuple[list[torch.Tensor | None], list[list[torch.Tensor]]]:
    """Gradients of each stage's weight, and what each rank sent."""

    def on_rank(comm: Communicator) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        stage = Stage(functions[comm.rank], comm.rank)
        transport = Counting(comm)
        executor = PipelineExecutor(
            one_f_one_b(len(functions), microbatches),
            {comm.rank: stage},
            transport,
            loss=total,
            **options,
        )
        for _ in range(steps):
            executor.step(start, divisor=2.0)
        return stage.weight.grad, transport.sent

    results = LocalWorld(len(functions), timeout_s=10.0).run(on_rank)
    return [gradient for gradient, _ in results], [sent for _, sent in results]


def serial_gradients(functions: Functions, steps: int = 1, microbatches: int = 3) -> Any:
    stages = [Stage(function, number) for number, function in enumerate(functions)]
    for _ in range(steps):
        serial_step(stages, start, total, microbatches, divisor=2.0)
    return [stage.weight.grad for stage in stages]


def assert_serial(functions: Functions, **options: Any) -> list[list[torch.Tensor]]:
    seen, sent = run_stages(functions, **options)
    right = serial_gradients(functions, options.get("steps", 1))
    for ours, theirs in zip(seen, right, strict=True):
        # A weight without use has no gradient; in front of a boundary it may have zeros.
        zeros = torch.zeros(3, 3, dtype=F64)
        ours = zeros if ours is None else ours
        theirs = zeros if theirs is None else theirs
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    return sent


def linear(weight: torch.Tensor, *hidden: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    (tensor,) = hidden or tuple(inputs.values())
    return torch.tanh(tensor @ weight)


def sum_all(weight: torch.Tensor, *hidden: torch.Tensor) -> torch.Tensor:
    parts = [(tensor.to(F64) ** 2).sum() for tensor in hidden]
    return torch.stack(parts).sum() * weight.sum()


TUPLES: dict[str, Functions] = {
    "a view": (lambda w, x: (x @ w).view(3, 2).t(), sum_all),
    "a tensor and a slice of it": (lambda w, x: ((y := x @ w), y[:1]), sum_all),
    "the same tensor twice": (lambda w, x: ((y := x @ w), y), sum_all),
    "its input unchanged": (linear, lambda w, h: h, lambda w, h: (h * w.sum()).sum()),
    "its input twice": (linear, lambda w, h: (h, h), sum_all),
    "its own weight": (lambda w, x: (w, x @ w), sum_all),
    "a strided tensor": (lambda w, x: (x @ w).t(), sum_all),
    "an expanded tensor": (lambda w, x: (x @ w)[:, :1].expand(2, 4), sum_all),
    "an input the next does not use": (
        lambda w, x: (x @ w, x @ w * 2),
        lambda w, a, b: (a @ w) ** 2,
    ),
    "nothing the next can use": (linear, lambda w, h: w.sum()),
    "a scalar": (lambda w, x: (x @ w).sum(), sum_all),
    "a list": (lambda w, x: [x @ w, x], sum_all),
    "a complex tensor": (
        lambda w, x: torch.complex(x @ w, x),
        lambda w, z: (z.conj() * z).real.sum() * w.sum(),
    ),
    "a conjugate view": (
        lambda w, x: torch.complex(x @ w, x).conj(),
        lambda w, z: (z.imag + 2 * z.real).sum() * w.sum(),
    ),
    "many tensors": (lambda w, x: tuple(x @ w * k for k in range(1, 12)), sum_all),
}


@pytest.mark.parametrize("what", TUPLES)
@pytest.mark.parametrize("receive_ahead", [True, False])
def test_gradients_are_the_serial_ones_where_a_stage_hands_on(
    what: str, receive_ahead: bool
) -> None:
    assert_serial(TUPLES[what], steps=2, receive_ahead=receive_ahead)


def test_a_dict_arrives_as_a_dict() -> None:
    first = Stage(lambda w, x: {"hidden": x @ w, "mask": x > 0, "größe": torch.tensor(2)})
    second = Stage(lambda w, named: (named["hidden"] * named["mask"] * named["größe"]) @ w, 1)

    assert_serial((first.function, second.function))


def test_the_user_may_keep_an_output_and_read_it_after_the_step() -> None:
    kept: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []

    def keeping(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        output = x @ weight
        kept.append(output)
        copies.append(output.detach().clone())
        return output.view(-1)

    run_stages((keeping, sum_all))

    assert len(kept) == 3
    assert all(map(torch.equal, kept, copies))


MIXED: Functions = (
    lambda w, x: (x @ w, (x > 0).long(), x.new_empty(0, 3), x * 2, x[:0] @ w),
    lambda w, h, mask, empty, constant, none: (
        (h * mask + constant + empty.sum() + none.sum()) * w[0]
    ),
)


@pytest.mark.parametrize("declared", [False, True])
def test_only_differentiable_tensors_get_a_gradient_message(declared: bool) -> None:
    spec = (
        TensorSpec((2, 3), F64),
        TensorSpec((2, 3), torch.int64),
        TensorSpec((0, 3), F64, needs_grad=False),
        TensorSpec((2, 3), F64, needs_grad=False),
        TensorSpec((0, 3), F64),
    )
    boundary = BoundarySpec({0: spec}) if declared else None

    first, last = assert_serial(MIXED, boundary=boundary)

    payloads = 3 * 3
    assert len(first) == payloads if declared else payloads + 3
    assert [tuple(gradient.shape) for gradient in last] == [(2, 3)] * 3


def test_all_tensors_of_a_tuple_arrive_whole() -> None:
    sizes = (1, 1_000_000, 7)

    def numbered(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(weight.new_full((size,), float(x[0, 0])) for size in sizes)

    def check(weight: torch.Tensor, *hidden: torch.Tensor) -> torch.Tensor:
        number = hidden[0][0]
        for tensor, size in zip(hidden, sizes, strict=True):
            assert tensor.shape == (size,)
            assert bool((tensor == number).all())
        return weight.sum() * number

    assert_serial((numbered, check))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.uint16,
        torch.uint32,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_every_dtype_crosses_unchanged(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, 1.0], [2.0, 96.0]]).to(dtype)
    seen: list[torch.Tensor] = []

    def look(weight: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return weight.sum()

    run_stages((lambda w, x: values, look), microbatches=1)

    assert seen[0].dtype == dtype
    assert seen[0].tolist() == values.tolist()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "got NoneType"),
        ((torch.ones(1), None), "a tuple that holds NoneType"),
        ({"a": 1.0}, "a dict that holds float"),
        ({1: torch.ones(1)}, "a dict with the key 1"),
        (((torch.ones(1),),), "a tuple that holds tuple"),
    ],
)
def test_what_is_no_tensor_cannot_cross(output: Any, message: str) -> None:
    with pytest.raises(BoundaryError, match=f"stage 0 must hand on a tensor.*{message}"):
        run_stages((lambda w, x: output, sum_all))


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec((2, 4), F64),
        TensorSpec((2, 3), torch.float32),
        (TensorSpec((2, 3), F64),),
        {"h": TensorSpec((2, 3), F64)},
        (TensorSpec((2, 3), F64), TensorSpec((2, 3), F64)),
    ],
)
def test_an_output_that_is_not_as_declared_is_refused_before_it_is_sent(spec: Any) -> None:
    with pytest.raises(BoundaryError, match=r"0 handed on a tensor of \(0: float64\[2, 3\]\)"):
        run_stages((linear, sum_all), boundary=BoundarySpec({0: spec}))


def test_a_declaration_that_would_lose_a_gradient_is_refused() -> None:
    boundary = BoundarySpec({0: TensorSpec((2, 3), F64, needs_grad=False)})

    with pytest.raises(BoundaryError, match="gradient would be lost"):
        run_stages((linear, sum_all), boundary=boundary)


def test_a_declared_gradient_may_find_no_use() -> None:
    boundary = BoundarySpec({0: TensorSpec((2, 3), F64)})

    (first, _), (_, gradients) = run_stages((lambda w, x: x, sum_all), boundary=boundary)

    assert first is None
    assert len(gradients) == 3


def test_in_an_evaluation_no_output_needs_a_gradient() -> None:
    boundary = BoundarySpec({0: TensorSpec((3, 3), F64, needs_grad=False)})

    def on_rank(comm: Communicator) -> float:
        stage = Stage(lambda w, *_, **__: w)
        executor = PipelineExecutor(
            one_f_one_b(2, 1), {comm.rank: stage}, comm, loss=total, boundary=boundary
        )
        return float(executor.evaluate(start, 1).loss_sum)

    _, loss = LocalWorld(2, timeout_s=10.0).run(on_rank)

    assert loss == pytest.approx(float(Stage(sum_all).weight.detach().sum()))


def test_ranks_that_disagree_about_declared_boundaries_hear_of_it() -> None:
    def on_rank(comm: Communicator) -> None:
        boundary = BoundarySpec({0: TensorSpec((32,), torch.int64)}) if comm.rank == 0 else None
        executor = PipelineExecutor(
            one_f_one_b(2, 1),
            {comm.rank: Stage(lambda w, h: h)},
            comm,
            loss=total,
            boundary=boundary,
        )
        numbers = {"h": torch.arange(32)}
        executor.step(lambda s, m: numbers if s == 0 else {}, divisor=1.0)

    with pytest.raises(BoundaryError, match="must be given the same BoundarySpec"):
        LocalWorld(2, timeout_s=10.0).run(on_rank)


def test_impossible_specs_are_refused() -> None:
    with pytest.raises(BoundaryError, match="no gradient"):
        TensorSpec((1,), torch.int64, needs_grad=True)
    with pytest.raises(BoundaryError, match="must not be negative"):
        TensorSpec((-1,), F64)
    with pytest.raises(BoundaryError, match="declared by TensorSpec, got int"):
        BoundarySpec({0: (1, 2)})  # type: ignore[dict-item]


SPECS = st.builds(
    TensorSpec,
    st.lists(st.integers(0, 2**40), max_size=5),
    st.sampled_from([torch.float64, torch.bfloat16, torch.complex128]),
    st.booleans(),
)
CROSSINGS = st.one_of(
    st.builds(lambda spec: Crossing(Form("tensor"), (spec,)), SPECS),
    st.builds(lambda specs: Crossing(Form("tuple"), tuple(specs)), st.lists(SPECS, max_size=9)),
    st.builds(
        lambda named: Crossing(Form("dict", tuple(named)), tuple(named.values())),
        st.dictionaries(st.text(max_size=20), SPECS, max_size=4),
    ),
)


@settings(max_examples=30, deadline=None)
@given(CROSSINGS)
def test_a_header_says_all_there_is_to_know(crossing: Crossing) -> None:
    ints = encode(crossing)

    assert decode(ints) == crossing
    assert len(ints) == FIRST_INTS + missing_ints(ints[:FIRST_INTS])
    assert torch.tensor(ints, dtype=torch.int64).tolist() == ints


def test_the_usual_boundary_needs_one_header_message() -> None:
    hidden = TensorSpec((4, 2048, 4096), torch.bfloat16)

    ints = encode(Crossing(Form("tuple"), (hidden, hidden, hidden)))

    assert missing_ints(ints) == 0


class Stamp(torch.autograd.Function):
    """Hands on a tensor of one number, and back a gradient of another; writes down what comes."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, onward: torch.Tensor, back: float, log: list[Any]
    ) -> torch.Tensor:
        ctx.shape, ctx.back, ctx.log = hidden.shape, back, log
        log.append(hidden.tolist())
        return onward

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.log.append(gradient.tolist())
        return gradient.new_full(ctx.shape, ctx.back), None, None, None


@pytest.mark.parametrize("receive_ahead", [True, False])
@pytest.mark.parametrize("sizes", [(3, 3, 3), (1, 2, 1)])
def test_messages_of_both_neighbours_on_one_rank_do_not_cross_over(
    sizes: tuple[int, int, int], receive_ahead: bool
) -> None:
    # Two ranks, four stages: each rank is before and behind the other. Outputs are 1s, 3s and 5s,
    # gradients 6s, 2s and 4s, all of them between the same two ranks.
    onward, back = (1.0, 3.0, 5.0, 7.0), (0.0, 6.0, 2.0, 4.0)

    class Stamping(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage = stage
            self.log: list[Any] = []

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            size = (*sizes, 1)[self.stage]
            output = torch.full((size,), onward[self.stage], dtype=F64)
            return Stamp.apply(hidden, output, back[self.stage], self.log)

    def on_rank(comm: Communicator) -> dict[int, list[Any]]:
        stages = {stage: Stamping(stage) for stage in (comm.rank, comm.rank + 2)}
        executor = PipelineExecutor(
            interleaved_1f1b(2, 2, 2), stages, comm, loss=torch.sum, receive_ahead=receive_ahead
        )
        x = torch.zeros(1, dtype=F64, requires_grad=True)
        executor.step(lambda stage, _: {"hidden": x} if stage == 0 else {}, divisor=1.0)
        return {number: stage.log for number, stage in stages.items()}

    first, second = LocalWorld(2, timeout_s=10.0).run(on_rank)

    logs = {**first, **second}
    for stage in (1, 2, 3):
        assert logs[stage].count([onward[stage - 1]] * sizes[stage - 1]) == 2
    for stage in (0, 1, 2):
        assert logs[stage].count([back[stage + 1]] * sizes[stage]) == 2
