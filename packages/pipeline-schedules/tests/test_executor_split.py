"""Backwards in two parts: the gradients of whole ones, none computed twice, none forgotten."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.pipeline_schedules import GENERATORS, Action, Kind, Schedule, gpipe
from trainwright.pipeline_schedules.execute import (
    PipelineExecutor,
    SplitOperation,
    StepResult,
    weight_gradients,
)
from trainwright.pipeline_schedules.execute.run import Run
from trainwright.pipeline_schedules.execute.testing import serial_step

# Shapes: B rows, S positions, D width.

WIDTH = 4
MICROBATCHES = 3
Inputs = Callable[[int, int], Mapping[str, Any]]


def split_backwards(schedule: Schedule, delay: int) -> Schedule:
    """Put I in place of each B, and its W behind the computation ``delay`` places further on."""
    actions = []
    for rank in range(schedule.num_ranks):
        computed: list[Action] = []
        owed: list[tuple[int, Action]] = []
        for number, action in enumerate(schedule.program(rank)):
            computed.append(attrs.evolve(action, kind=Kind.I) if action.kind is Kind.B else action)
            if action.kind is Kind.B:
                owed.append((number + delay, attrs.evolve(action, kind=Kind.W)))
            while owed and owed[0][0] <= number and action.kind is not Kind.F_PAIRED:
                computed.append(owed.pop(0)[1])
        computed += [action for _, action in owed]
        rows = [(action.kind, action.stage, action.microbatch) for action in computed]
        actions.append(np.array(rows, dtype=np.int32))
    return Schedule(actions, schedule.rank_of_stage, schedule.num_microbatches, "split")


class Block(nn.Module):
    """All sorts of weights: with and without bias, used twice, frozen, a norm, an embedding."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fused = nn.Linear(WIDTH, 2 * WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.factor = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.weight.requires_grad_(False)
        self.position = nn.Embedding(8, WIDTH)
        self.to(dtype)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        normed_BSD = self.norm(hidden_BSD + self.position.weight[: hidden_BSD.shape[1]])
        gate_BSD, up_BSD = self.fused(normed_BSD).relu_().chunk(2, -1)
        once_BSD = self.twice(torch.tanh(gate_BSD) * up_BSD)
        rows_ND = self.twice(once_BSD).flatten(0, 1)
        rows_ND = torch.addmm(self.frozen.bias, rows_ND, self.factor.t()) @ self.factor
        return hidden_BSD + self.frozen(rows_ND.view_as(hidden_BSD))


UNSPLIT = ("norm", "position")


def squares(output: torch.Tensor) -> torch.Tensor:
    return (output**2).sum()


def hidden(stage: int, microbatch: int) -> Mapping[str, Any]:
    if stage > 0:
        return {}
    generator = torch.Generator().manual_seed(microbatch)
    shape = (2, 3 + microbatch, WIDTH)
    return {"hidden_BSD": torch.randn(shape, generator=generator, dtype=torch.float64)}


def gradients_of(stage: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in stage.named_parameters()
    }


def assert_same(seen: Mapping[str, Any], right: Mapping[str, Any], tolerance: float = 0.0) -> None:
    assert seen.keys() == right.keys()
    for name, gradient in right.items():
        if gradient is None:
            assert seen[name] is None
        else:
            atol = tolerance * float(gradient.abs().max())
            torch.testing.assert_close(seen[name], gradient, rtol=0.0, atol=atol, msg=name)


def alone(
    schedule: Schedule, stage: nn.Module, inputs: Inputs = hidden, **options: Any
) -> StepResult:
    """One step of one stage, in this process."""
    options.setdefault("loss", squares)
    executor = PipelineExecutor(schedule, {0: stage}, SingleCommunicator(), **options)
    return executor.step(inputs, divisor=2.0)


def whole_and_split(
    make: Callable[[], nn.Module], inputs: Inputs = hidden, delay: int = 2, **options: Any
) -> tuple[nn.Module, nn.Module, StepResult]:
    """The same stage after a step of whole backwards, and after one of split ones."""
    whole, split = make(), make()
    schedule = gpipe(1, MICROBATCHES)
    alone(schedule, whole, inputs, **options)
    result = alone(split_backwards(schedule, delay), split, inputs, **options)
    return whole, split, result


@pytest.mark.parametrize("node_bytes", [0, 100, weight_gradients._NODE_BYTES])
@pytest.mark.parametrize("delay", [0, 1, 9])
def test_split_backwards_give_bit_for_bit_the_gradients_of_whole_ones(
    delay: int, node_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Products are paid one by one where they are large.
    monkeypatch.setattr(weight_gradients, "_NODE_BYTES", node_bytes)

    whole, split, result = whole_and_split(Block, delay=delay)

    assert_same(gradients_of(split), gradients_of(whole))
    assert result.unsplit == {f"stage 0 {name}": MICROBATCHES for name in UNSPLIT}
    assert result.whole_backwards == 0


class Complex(nn.Module):
    """Every product that is taken apart, of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)
        self.factor = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.empty(WIDTH, dtype=torch.complex128))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        rows_ND = (self.linear(hidden_BSD * (1 + 2j)) @ self.factor).flatten(0, 1)
        return torch.addmm(self.bias, rows_ND, self.factor).abs()


def test_split_backwards_of_complex_products_give_the_gradients_of_whole_ones() -> None:
    whole, split, result = whole_and_split(Complex)

    assert_same(gradients_of(split), gradients_of(whole), 1e-12)
    assert result.unsplit == {}


SPLIT_SCHEDULES = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v", "interleaved-1f1b", "1f1b")


@settings(max_examples=10, deadline=None)
@given(
    name=st.sampled_from(SPLIT_SCHEDULES),
    ranks=st.integers(1, 3),
    microbatches=st.integers(1, 5),
    delay=st.integers(0, 3),
)
def test_every_split_schedule_computes_what_the_serial_run_computes(
    name: str, ranks: int, microbatches: int, delay: int
) -> None:
    chunks = 1 if name in ("zb-h1", "zb-h2", "1f1b") else 2
    schedule = split_backwards(GENERATORS[name].make(ranks, microbatches, chunks), delay)
    serial = [Block(stage) for stage in range(schedule.num_stages)]

    def on_rank(comm: Communicator) -> tuple[float, dict[int, dict[str, Any]]]:
        stages = {stage: Block(stage) for stage in schedule.stages_of(comm.rank)}
        executor = PipelineExecutor(schedule, stages, comm, loss=squares)
        loss = float(executor.step(hidden, divisor=2.0).loss_sum)
        return loss, {number: gradients_of(stage) for number, stage in stages.items()}

    outcomes = LocalWorld(ranks, timeout_s=10.0).run(on_rank)
    right = float(serial_step(serial, hidden, squares, microbatches, divisor=2.0))

    assert sum(loss for loss, _ in outcomes) == pytest.approx(right, rel=1e-13)
    for _, stages in outcomes:
        for number, gradients in stages.items():
            # A delayed W may add a microbatch after a later one's; in float64 that is all it does.
            assert_same(gradients, gradients_of(serial[number]), tolerance=1e-12)


def test_a_forward_of_an_overlapped_pair_runs_before_the_backward_below_it() -> None:
    whole, paired = Block(), Block()
    rows = [(Kind.F, 0, 0), (Kind.F_PAIRED, 0, 1), (Kind.I, 0, 0), (Kind.W, 0, 0), (Kind.B, 0, 1)]
    alone(gpipe(1, 2), whole)

    result = alone(Schedule([np.array(rows, dtype=np.int32)], [0], 2), paired)

    assert_same(gradients_of(paired), gradients_of(whole))
    assert result.unsplit == {"stage 0 norm": 1, "stage 0 position": 1}


class Products(TorchDispatchMode):
    """Counts the products and what else takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "tanh", "sum", "native_layer_norm_backward"):
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


class Recomputing(Block):
    """Keeps its input alone."""

    use_reentrant = False

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, hidden_BSD, use_reentrant=self.use_reentrant)


class RecomputingAnew(Recomputing):
    """PyTorch's older way, which runs a backward within the backward."""

    use_reentrant = True

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_BSD.requires_grad_())


@pytest.mark.parametrize("make", [Block, Recomputing, RecomputingAnew])
def test_a_split_backward_computes_nothing_twice(make: Callable[[], nn.Module]) -> None:
    counts = {}
    gradients = {}
    for name, schedule in (("whole", gpipe(1, 2)), ("split", split_backwards(gpipe(1, 2), 1))):
        stage = make()
        with Products() as products:
            result = alone(schedule, stage)
        counts[name] = sorted(products.calls)
        gradients[name] = gradients_of(stage)
        assert result.whole_backwards == 0

    assert counts["split"] == counts["whole"]
    assert_same(gradients["split"], gradients["whole"])


def test_only_inputs_and_gradients_of_products_wait_for_w() -> None:
    alive: dict[str, weakref.ref[torch.Tensor]] = {}
    left: dict[str, set[str]] = {}

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            self.second = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
            product = self.first(hidden_BSD)
            input = torch.tanh(product)
            output = torch.exp(self.second(input))
            for name, tensor in (("product", product), ("input", input), ("output", output)):
                alive[name] = weakref.ref(tensor)
            # Kept by exp, not needed by any product.
            return output.clone()

    def see(name: str) -> None:
        gc.collect()
        left[name] = {key for key, tensor in alive.items() if tensor() is not None}

    stage = Stage()
    executor = PipelineExecutor(
        split_backwards(gpipe(1, 1), 0), {0: stage}, SingleCommunicator(), loss=squares
    )
    see_at = {"I": "after I", "W": "after W"}
    perform = Run.perform

    def watch(run: Run, instruction: Any) -> None:
        perform(run, instruction)
        if instruction.operation.value in see_at:
            see(see_at[instruction.operation.value])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "perform", watch)
        executor.step(hidden, divisor=1.0)

    assert left == {"after I": {"input"}, "after W": set()}


@pytest.mark.parametrize("trained", ["weight", "bias", "nothing"])
def test_frozen_weights_and_biases_stay_without_gradients(trained: str) -> None:
    def make() -> nn.Module:
        stage = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64), Block())
        for name, parameter in stage[1].named_parameters():
            nn.init.constant_(parameter, 0.1)
            parameter.requires_grad_(name == trained)
        return Named(stage)

    whole, split, _ = whole_and_split(make)

    assert_same(gradients_of(split), gradients_of(whole))


def test_a_weight_frozen_after_its_forward_gets_nothing_as_in_a_whole_backward() -> None:
    made: list[Named] = []

    def make() -> nn.Module:
        made.append(Named(nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64))))
        nn.init.constant_(made[-1].stage[1].weight, 0.1)
        nn.init.constant_(made[-1].stage[1].bias, 0.1)
        return made[-1]

    def loss(output: torch.Tensor) -> torch.Tensor:
        for named in made:
            named.stage[1].weight.requires_grad_(False)
        return squares(output)

    whole, split, _ = whole_and_split(make, loss=loss)

    assert_same(gradients_of(split), gradients_of(whole))


class Named(nn.Module):
    """Takes the input by the name that the tests give it."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        return self.stage(hidden_BSD)


def test_a_weight_tied_to_an_embedding_gets_both_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, WIDTH, dtype=torch.float64)
            self.head = nn.Linear(WIDTH, 5, bias=False, dtype=torch.float64)
            nn.init.constant_(self.table.weight, 0.3)
            self.head.weight = self.table.weight

        def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.table(tokens_BS)))

    def tokens(stage: int, microbatch: int) -> Mapping[str, Any]:
        return {"tokens_BS": torch.arange(2 + microbatch).view(1, -1)}

    whole, split, result = whole_and_split(Tied, tokens)

    # The embedding's part comes in I and so before those of earlier W: another order of addition.
    assert_same(gradients_of(split), gradients_of(whole), tolerance=1e-14)
    assert result.unsplit == {"stage 0 table": MICROBATCHES}
    assert result.whole_backwards == 0


def test_what_has_no_product_runs_whole_and_is_counted() -> None:
    def make() -> nn.Module:
        return Named(nn.Sequential(nn.LayerNorm(WIDTH, dtype=torch.float64)))

    whole, split, result = whole_and_split(make)

    assert_same(gradients_of(split), gradients_of(whole))
    assert result.whole_backwards == MICROBATCHES
    assert result.unsplit == {"stage 0 stage.0": MICROBATCHES}


def test_gradients_of_several_outputs_of_one_product_reach_their_own_rows() -> None:
    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 4, bias=False, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = self.linear(x).chunk(2, -1)
            return a, b

    def weighted(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return output[0].sum() + (10 * output[1]).sum()

    stage = Chunked()
    one = torch.ones(1, 1, dtype=torch.float64)
    executor = PipelineExecutor(
        split_backwards(gpipe(1, 1), 0), {0: stage}, SingleCommunicator(), loss=weighted
    )
    executor.step(lambda *_: {"x": one}, divisor=1.0)

    assert stage.linear.weight.grad is not None
    assert stage.linear.weight.grad.flatten().tolist() == [1.0, 1.0, 10.0, 10.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_split_backwards_under_autocast_are_bit_for_bit_whole_ones(dtype: torch.dtype) -> None:
    class Lowered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)
            ).to(dtype)
            for parameter in self.parameters():
                nn.init.constant_(parameter, 0.3)

        def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.block(hidden_BSD.to(dtype)).to(dtype)

    whole, split, result = whole_and_split(Lowered)

    assert_same(gradients_of(split), gradients_of(whole))
    assert result.unsplit == {}


class Using(nn.Module):
    """A stage made of a function of two linear layers and the input."""

    def __init__(self, function: Callable[[nn.Module, nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.a = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.b = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        return self.function(self.a, self.b, hidden_BSD)


def kept_elsewhere(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.clone):
        return b(torch.tanh(a(x)))


def nested(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return checkpoint(b, torch.tanh(a(y)), use_reentrant=False)

    return checkpoint(inner, x, use_reentrant=False)


def rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, WIDTH)[:WIDTH]


SPLIT_USES: dict[str, Any] = {
    "three times": lambda a, b, x: a(torch.tanh(a(torch.tanh(a(x))))),
    "on a vector": lambda a, b, x: a(x[0, 0]) * b(x[0, 1]),
    "on no rows": lambda a, b, x: a(x[:0]).sum() + b(x),
    "on strided rows": lambda a, b, x: a(x.transpose(0, 1)),
    "by keyword": lambda a, b, x: F.linear(input=x, weight=a.weight, bias=b.bias),
    "in slices": lambda a, b, x: F.linear(x, a.weight[:2]) + F.linear(x, a.weight[2:], b.bias[2:]),
    "in parts": lambda a, b, x: sum(F.linear(x, part) for part in a.weight.split(1)),
    "changed in place": lambda a, b, x: a(x).mul_(2).add_(b(x)),
    "with saved tensors elsewhere": kept_elsewhere,
    "recomputed within recomputed layers": nested,
    # Not the weight: one that depends on the input, whose gradient I owes.
    "to make a weight": lambda a, b, x: F.linear(b(x), a(rows(x)).view(WIDTH, WIDTH)),
    "beside the input as a weight": lambda a, b, x: F.linear(a(x), rows(x)),
}
WHOLE_USES: dict[str, Any] = {
    "with itself": lambda a, b, x: F.linear(a.weight, a.weight).sum() * x,
    "mapped": lambda a, b, x: torch.vmap(lambda y: F.linear(y, a.weight))(x),
    "by einsum": lambda a, b, x: torch.einsum("bsd,de->bse", x, a.weight),
    "scaled first": lambda a, b, x: F.linear(x, a.weight * 2.0),
}


@pytest.mark.parametrize("use", [*SPLIT_USES, *WHOLE_USES])
def test_whatever_a_stage_does_with_a_weight_its_gradient_is_right(use: str) -> None:
    function = {**SPLIT_USES, **WHOLE_USES}[use]

    whole, split, result = whole_and_split(lambda: Using(function))

    # A weight that is used both in a product and otherwise adds its parts in another order.
    assert_same(gradients_of(split), gradients_of(whole), tolerance=1e-14)
    assert result.whole_backwards == (MICROBATCHES if use in WHOLE_USES else 0)
    assert result.unsplit == ({"stage 0 a": MICROBATCHES} if use in WHOLE_USES else {})


class OwnProduct(torch.autograd.Function):
    """A product as a package of its own may write it: it knows nothing of pipelines."""

    weights = (1,)

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.scale = scale
        return scale * (input @ weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        of_input, _, _ = OwnProduct.input_gradient(ctx, gradient)
        return of_input, *OwnProduct.weight_gradient(ctx, gradient), None

    @staticmethod
    def input_gradient(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.scaled = ctx.scale * gradient
        _, weight = ctx.saved_tensors
        return ctx.scaled @ weight.t(), None, None

    @staticmethod
    def weight_gradient(ctx: Any, gradient: torch.Tensor) -> Any:
        input, *_ = ctx.saved_tensors
        return (input.flatten(0, 1).t() @ ctx.scaled.flatten(0, 1),)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.3, dtype=torch.float64))

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        arguments = (hidden_BSD, self.weight, 2.0)
        tensors = arguments[:2]
        if has_torch_function(tensors):
            return handle_torch_function(OwnProduct.apply, tensors, *arguments)
        return OwnProduct.apply(*arguments)


def test_an_operation_joins_by_carrying_both_halves_of_its_backward() -> None:
    whole, split, result = whole_and_split(Scaled)

    assert isinstance(OwnProduct, SplitOperation)
    assert_same(gradients_of(split), gradients_of(whole))
    assert result.unsplit == {}
