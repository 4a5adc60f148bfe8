"""FP8 products in tensor-parallel layers multiply, bit for bit, what one rank multiplies."""

# Shapes: B batch, S sequence, M = B * S tokens, I in_features, O out_features.

from __future__ import annotations

import threading

import attrs
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.collectives import LocalWorld
from trainwright.collectives.differentiable import replicate_to_partial
from trainwright.pipeline_schedules.execute import WeightGradients
from trainwright.pipeline_schedules.execute.split import SplitProducts
from trainwright.precision.float8 import (
    Blockwise,
    Current,
    Delayed,
    Float8State,
    Mx,
    PerRow,
    Scope,
    convert_linears,
    products,
)
from trainwright.sharding import Mesh, MeshShape
from trainwright.sharding.tensor import (
    ColumnParallelLinear,
    Cut,
    KeyValueLinear,
    RowParallelLinear,
    SequenceSharding,
    enter_sequence,
)
from trainwright.sharding.tensor.testing import BlockPlan, ParallelBlock, PlainBlock
from trainwright.sharding.testing import assert_close, check_products, load_plain_, mesh_of

BATCH, LENGTH, STEPS = 2, 6, 2
UNITS = {Delayed(history=2): 3, Current(): 5, PerRow(): 3, Blockwise(): 128, Mx(): 32}
WITHOUT_BLOCKS = (Delayed(history=2), Current(), PerRow())
# The dims of both operands of the three products: first one, then the one that is summed over.
DIMS = (("MI", "OI"), ("MO", "IO"), ("OM", "IM"))


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@attrs.frozen
class Case:
    """One layer over some ranks.

    Args:
        recipe: Of its products.
        kind: "column", "row" or "key_value".
        sizes: In units of the recipe: of the ranks' parts.
        dp: Ranks with a microbatch each.
        kept: "off", or what is kept of cut sequences: "shards" or "whole".
        entered: Whether a column's input is entered before.
        way: "whole" backward, "split", or "again": recomputed.
        cp: Ranks with a part of each sequence.
    """

    recipe: object
    kind: str = "column"
    sizes: tuple[int, ...] = (1, 2)
    dp: int = 1
    kept: str = "off"
    entered: bool = False
    way: str = "whole"
    cp: int = 1

    @property
    def length(self):
        return LENGTH // self.cp

    @property
    def cut(self):
        unit = UNITS[self.recipe]
        if self.kind == "key_value":
            heads = Cut.even(len(self.sizes), len(self.sizes)).scaled(unit)
            shared = [
                (*own, heads.ranges[0][0]) if n else own for n, own in enumerate(heads.ranges)
            ]
            return Cut(heads.size, shared)
        # The last block of the whole may be smaller.
        ragged = [size * unit for size in self.sizes[:-1]]
        last = Cut.of_sizes([*ragged, max(1, self.sizes[-1] * unit - unit // 3)])
        if self.kind == "row" or 0 in self.sizes:
            return last
        return Cut.joined(Cut.even(len(self.sizes), len(self.sizes)).scaled(unit), last)

    @property
    def steps(self):
        return STEPS if self.recipe.history_length else 1

    @property
    def shape(self):
        return (40, self.cut.size) if self.kind == "row" else (self.cut.size, 40)

    @property
    def sequence(self):
        if self.kept == "off":
            return None
        return SequenceSharding(keeps_whole=self.kept == "whole", length=self.length)

    def plain(self):
        rows, columns = self.shape
        linear = nn.Linear(columns, rows, bias=self.dp == 1)
        with torch.no_grad():
            linear.weight.copy_(drawn(rows, columns, seed=1) * torch.arange(1, rows + 1)[:, None])
            linear.weight.mul_(torch.arange(columns, 0, -1))
            if linear.bias is not None:
                linear.bias.copy_(torch.arange(rows))
        return nn.Sequential(linear)

    def microbatch(self, step, number):
        """Return input and output's gradient, of sums that are exact, other in each feature."""
        rows, columns = self.shape
        seed = 100 + 10 * step + number
        # No negative zero, which sums do not give.
        gradient = drawn(BATCH, LENGTH, rows, seed=seed).mul(16 << number).round() + 0.0
        input = drawn(BATCH, LENGTH, columns, seed=seed + 50) * torch.arange(1, columns + 1)
        return input * 2.0 ** (step - number), gradient * torch.arange(rows, 0, -1)

    def layer(self, tp):
        rows, columns = self.shape
        options = {"cut": self.cut, "sequence": self.sequence, "bias": self.dp == 1}
        if self.kind == "row":
            return RowParallelLinear(columns, rows, tp, **options)
        kind = ColumnParallelLinear if self.kind == "column" else KeyValueLinear
        return kind(columns, rows, tp, input_is_entered=self.entered, **options)


class Operands:
    """Keeps the operands of each thread's products."""

    def __init__(self, monkeypatch):
        self._of_thread = threading.local()
        multiply = products.scaled_product

        def keep(first, second, dtype):
            self.seen.append((first, second))
            return multiply(first, second, dtype)

        monkeypatch.setattr(products, "scaled_product", keep)

    @property
    def seen(self):
        return vars(self._of_thread).setdefault("seen", [])

    def take(self):
        """Return the operands of output, input gradient and weight gradient."""
        seen, self._of_thread.seen = self.seen, []
        output, *others = seen
        for again in others[:-2]:
            assert_same_operands(again, output)
        return [(codes(q), scales(q)) for pair in (output, *others[-2:]) for q in pair]


def codes(operand):
    return operand.codes.clone()


def scales(operand):
    """Return the scale of each element, read from the block that it lies in."""
    rows, columns = operand.codes.shape
    of_row = torch.arange(rows) // operand.block[0]
    of_column = torch.arange(columns) // operand.block[1]
    return operand.scale_values()[of_row][:, of_column]


def assert_same_operands(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(codes(one), codes(other))
        assert torch.equal(scales(one), scales(other))


def run_once(model, input, gradient, case):
    """Run forward and backward in the way of the case."""
    debts = WeightGradients()
    if case.way == "split":
        with SplitProducts(debts):
            output = model(input)
        with debts.collecting((0, 0)):
            output.backward(gradient)
        debts.pay((0, 0))
    else:
        output = (
            checkpoint(model, input, use_reentrant=False) if case.way == "again" else model(input)
        )
        output.backward(gradient)
    return output.detach()


def train(model, batches, operands, case, end_step):
    found = []
    for step in range(case.steps):
        for input, gradient in batches(step):
            given = input.clone().requires_grad_()
            model.zero_grad()
            output = run_once(model, given, gradient, case)
            own = [p.grad for p in model.parameters()]
            found.append((operands.take(), output, given.grad, own))
        end_step()
    return found


def serial(case, operands):
    model = case.plain()
    state = convert_linears(model, case.recipe, keep_ends=False)
    numbers = range(case.dp)
    whole = attrs.evolve(case, way="whole")
    found = train(
        model,
        lambda step: [case.microbatch(step, number) for number in numbers],
        operands,
        whole,
        state.end_step,
    )
    return found, state.state_dict()


class Parts:
    """This rank's part of inputs, gradients and their like."""

    def __init__(self, case, mesh):
        self.case, self.tp = case, mesh.communicator("tp")
        self.cp, tp = mesh.communicator("cp"), self.tp
        self.first = self.cp.rank * case.length
        sequence = Cut.whole(case.length, tp.size)
        if case.kept != "off":
            sequence = Cut.uneven(case.length, tp.size)
        is_row = case.kind == "row"
        features, whole = (-1, case.cut), (1, sequence)
        self.input, self.output = (features, whole) if is_row else (whole, features)

    def of_input(self, tensor):
        dim, cut = self.input
        return cut.take(tensor.narrow(1, self.first, self.case.length), dim, self.tp.rank)

    def of_output(self, tensor):
        dim, cut = self.output
        return cut.take(tensor, dim, self.tp.rank)

    def of_gradient(self, gradient):
        """Return what arrives at this rank: of shared rows one term."""
        gradient = gradient.narrow(1, self.first, self.case.length)
        if self.case.kind != "key_value" or self.tp.size == 1:
            return self.of_output(gradient)
        # Every rank has a term of the first head.
        head = UNITS[self.case.recipe]
        shape = (*gradient.shape[:-1], head)
        terms = [drawn(*shape, seed=7 + rank).mul(8).round() for rank in range(self.tp.size)]
        terms[0] = gradient[..., :head] - sum(terms[1:])
        found = gradient.clone()
        found[..., :head] = terms[self.tp.rank]
        return self.of_output(found)

    def of_operand(self, tensor, dims):
        for dim, name in enumerate(dims):
            if name == ("I" if self.case.kind == "row" else "O"):
                tensor = self.case.cut.take(tensor, dim, self.tp.rank)
            if name == "M":
                tokens = tensor.unflatten(dim, (BATCH, LENGTH))
                tensor = tokens.narrow(dim + 1, self.first, self.case.length)
                tensor = tensor.flatten(dim, dim + 1)
        return tensor

    def counted(self, tensor, dims):
        """Return what counts on this rank of a gradient's operand: shared rows count once."""
        if self.case.kind != "key_value" or self.tp.rank == 0:
            return tensor
        # Behind its own head lies the first one.
        return tensor.narrow(dims.index("O"), 0, UNITS[self.case.recipe])


def parallel(case, operands, world):
    mesh = Mesh(world, MeshShape(dp=case.dp, cp=case.cp, tp=len(case.sizes)))
    tp, parts = mesh.communicator("tp"), Parts(case, mesh)
    layer = case.layer(tp)
    model = nn.Sequential(layer)
    load_plain_(model, case.plain().state_dict(), mesh_of(tp))
    scope = Scope(tokens=mesh.communicator("cp"))
    state = convert_linears(model, case.recipe, keep_ends=False, scope=scope)

    class Entering(nn.Module):
        def forward(self, hidden):
            if case.kind != "row" and case.entered:
                if case.sequence is None:
                    return replicate_to_partial(hidden, tp)
                return enter_sequence(hidden, tp, case.sequence)
            return hidden

    def batches(step):
        input, gradient = case.microbatch(step, mesh.coordinate("dp"))
        return [(parts.of_input(input), parts.of_gradient(gradient))]

    whole = nn.Sequential(Entering(), model)
    found = train(whole, batches, operands, case, lambda: state.end_step(mesh.world))
    return found, state.state_dict(), mesh, parts


def assert_same_parts(found, expected, parts):
    """Claim that operands are parts of the serial ones, bit for bit."""
    dims = [of_operand for pair in DIMS for of_operand in pair]
    for number, (pair, whole) in enumerate(zip(found, expected, strict=True)):
        for mine, serial_one in zip(pair, whole, strict=True):
            part = parts.of_operand(serial_one, dims[number])
            if number in (2, 4):
                mine, part = parts.counted(mine, dims[number]), parts.counted(part, dims[number])
            assert torch.equal(mine, part), f"operand {number} of {parts.case}"


def assert_results(case, found, expected):
    """Claim that outputs and gradients of one step and microbatch are the serial ones."""
    terms = 4 * max(*case.shape, BATCH * LENGTH)
    size = len(case.sizes)
    # Ranks of one part of a sequence lie side by side.
    by_cp = [found[first : first + size] for first in range(0, len(found), size)]
    for n, (dim, cut) in ((1, found[0][4].output), (2, found[0][4].input)):
        joined = [cut.join([result[n] for result in group], dim) for group in by_cp]
        assert_close(f"result {n}", torch.cat(joined, 1), expected[n], terms=terms)
    weights = [sum(result[3][0] for result in ranks) for ranks in zip(*by_cp, strict=True)]
    if case.kind == "key_value":
        weight = sum(weights)
    else:
        weight = case.cut.join(weights, 1 if case.kind == "row" else 0)
    assert_close("weight gradient", weight, expected[3][0], terms=terms)


@st.composite
def cases(draw, recipe):
    size = draw(st.integers(1, 4))
    return Case(
        recipe,
        draw(st.sampled_from(["column", "row", "key_value"])),
        tuple(draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))),
        draw(st.integers(1, 2)),
        draw(st.sampled_from(["off", "shards", "whole"])),
        draw(st.booleans()),
        draw(st.sampled_from(["whole", "split", "again"])),
        draw(st.integers(1, 2)) if recipe in WITHOUT_BLOCKS and size < 3 else 1,
    )


@pytest.mark.parametrize("recipe", UNITS, ids=str)
def test_products_keep_the_law_of_layers(recipe):
    check_products(lambda: Float8State(recipe, {"up": Scope()}).products["up"], (6, 40, 36))


@pytest.mark.parametrize("recipe", UNITS, ids=str)
def test_operands_of_cut_layers_are_parts_of_those_of_one_rank(recipe, monkeypatch):
    operands = Operands(monkeypatch)

    @settings(max_examples=2)
    @example(Case(recipe, "column", (1, 2), 2, "shards", True, "split"))
    @example(Case(recipe, "column", (2, 1), 1, "whole", False, "again"))
    @example(Case(recipe, "row", (1, 1, 1), 1, "shards"))
    @example(Case(recipe, "key_value", (1, 1, 1), 2, "off", True, "split"))
    @example(Case(recipe, "column", (1, 1), 1, "shards", cp=1 + (recipe in WITHOUT_BLOCKS)))
    @given(cases(recipe))
    def check(case):
        expected, whole_state = serial(case, operands)

        ranks = LocalWorld(case.dp * case.cp * len(case.sizes)).run(
            lambda world: parallel(case, operands, world)
        )

        for results, state, mesh, parts in ranks:
            assert state.keys() == whole_state.keys()
            for what in ("scale", "history"):
                for name, value in whole_state[what].items():
                    assert torch.equal(state[what][name], value), name
            mine = expected[mesh.coordinate("dp") :: case.dp]
            for result, whole in zip(results, mine, strict=True):
                assert_same_parts(result[0], whole[0], parts)
        for number in range(case.dp):
            group = [r for r in ranks if r[2].coordinate("dp") == number]
            for step in range(case.steps):
                found = [(*results[step], parts) for results, _, _, parts in group]
                assert_results(case, found, expected[step * case.dp + number])

    check()


@pytest.mark.parametrize(
    ("recipe", "fused", "size", "kept"),
    [
        (Delayed(history=2), "none", 3, "shards"),
        (Current(), "group", 4, "off"),
        (PerRow(), "block", 2, "whole"),
    ],
    ids=str,
)
def test_a_block_of_cut_layers_is_the_block_of_one_rank(recipe, fused, size, kept):
    # In float64 the order of sums moves no number over an edge of FP8. Key heads are shared.
    plan = BlockPlan(4, 2, fused=fused, p=0.0)
    batch = [drawn(BATCH, LENGTH, plan.width, seed=seed).double() for seed in range(2 * STEPS)]

    def train_block(block, tokens, end_step):
        found = []
        for step in range(STEPS):
            block.zero_grad()
            input = tokens(batch[2 * step] * 2.0**step).clone().requires_grad_()
            output = block(input)
            output.backward(tokens(batch[2 * step + 1]))
            found += [output.detach(), input.grad]
            end_step()
        return found

    plain = PlainBlock(plan)
    names = [name for name, m in plain.named_modules() if isinstance(m, nn.Linear)]
    state = convert_linears(plain, recipe, keep_ends=False)
    expected = train_block(plain, lambda whole: whole, state.end_step)
    cut = Cut.whole(LENGTH, size) if kept == "off" else Cut.uneven(LENGTH, size)
    sequence = None
    if kept != "off":
        sequence = SequenceSharding(keeps_whole=kept == "whole", length=LENGTH)

    def run(tp):
        block = ParallelBlock(plan, tp, sequence)
        load_plain_(block, plain.state_dict(), mesh_of(tp))
        own = convert_linears(block, recipe, keep_ends=False)
        assert list(own.products) == names
        found = train_block(
            block, lambda whole: cut.take(whole, 1, tp.rank), lambda: own.end_step(tp)
        )
        for name, history in state.histories().items():
            assert torch.allclose(own.histories()[name], history, rtol=1e-6, atol=0.0), name
        return found

    ranks = LocalWorld(size).run(run)

    for number, whole in enumerate(expected):
        joined = cut.join([found[number] for found in ranks], 1)
        assert_close(f"result {number}", joined, whole, terms=1024)
