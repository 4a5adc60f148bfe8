"""Delayed scales are those of one rank that has seen everything, whatever runs where and twice."""

import copy
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.collectives import LocalWorld
from trainwright.precision import PrecisionError
from trainwright.precision.float8 import (
    Along,
    Blockwise,
    Current,
    Delayed,
    Float8State,
    Mx,
    PerRow,
    Role,
    Scope,
    convert_linears,
    products,
    scaled_product,
)
from trainwright.precision.formats import E4M3
from trainwright.precision.testing import CountingCommunicator

ALL = (Delayed(history=4), Current(), PerRow(), Blockwise(), Mx())


def drawn(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def make_model(width=8):
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=number, scale=0.5))
    return model


def run(model, microbatch, forward=None):
    """Run one microbatch; the gradient of the weights adds up."""
    output = (forward or model)(microbatch)
    (output.square().sum() * 1e-3).backward()
    return output.detach()


def same(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def meets(state, amax):
    state.products["up"].operand(torch.tensor([[amax]]), Role.INPUT, Along.COLUMNS, True)


def test_a_history_entry_is_the_maximum_over_the_microbatches_of_a_step():
    state = Float8State(Delayed(), {"up": Scope()})
    for amax in (8.0, 2.0, 1.0):
        meets(state, amax)

    state.end_step()

    assert state.histories()["up.input"].tolist() == [8.0] + [0.0] * 15
    assert state.scales()["up.input"].item() == 448 / 8
    operand = state.products["up"].operand(
        torch.tensor([[16.0, -1.0]]), Role.INPUT, Along.COLUMNS, False
    )
    assert operand.format.decode(operand.codes).tolist() == [[448.0, -56.0]]
    assert operand.dequantize().tolist() == [[8.0, -1.0]]


def test_the_scale_looks_back_as_far_as_the_history_and_leaves_the_margin():
    state = Float8State(Delayed(history=2, margin=1), {"up": Scope()})
    scales = []

    for amax in (8.0, 2.0, 1.0):
        meets(state, amax)
        state.end_step()
        scales.append(state.scales()["up.input"].item())

    assert scales == [28.0, 28.0, 112.0]


@settings(max_examples=8)
@example(ranks=4, microbatches=4, steps=3, seed=0)
@given(
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 4),
    steps=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_scales_and_codes_of_ranks_are_those_of_one_rank(ranks, microbatches, steps, seed):
    def inputs(step, number):
        return drawn(3, 8, seed=100 * seed + 10 * step + number, scale=2.0 ** (number - step))

    def train(communicator, mine):
        model = make_model()
        state = convert_linears(model, Delayed(history=2), keep_ends=False)
        outputs, histories = {}, []
        for step in range(steps):
            for number in mine:
                outputs[step, number] = run(model, inputs(step, number))
            state.end_step(communicator)
            histories.append((state.histories(), state.scales()))
        return outputs, histories

    whole_outputs, whole = train(None, range(microbatches))
    found = LocalWorld(ranks).run(lambda comm: train(comm, range(comm.rank, microbatches, ranks)))

    for outputs, histories in found:
        assert all(
            same(a, b)
            for mine, serial in zip(histories, whole, strict=True)
            for a, b in zip(mine, serial, strict=True)
        )
        assert all(torch.equal(outputs[key], whole_outputs[key]) for key in outputs)


def test_a_step_ends_with_one_packed_collective():
    model = make_model()
    state = convert_linears(model, Delayed(), keep_ends=False)
    run(model, drawn(3, 8))
    pair = CountingCommunicator(size=2)

    state.end_step(pair)

    assert (pair.num_all_reduces, pair.num_bytes) == (1, 2 * 3 * 4)


@pytest.mark.parametrize("recipe", ALL[1:], ids=str)
def test_recipes_that_remember_nothing_end_steps_without_communication(recipe):
    state = convert_linears(make_model(), recipe, keep_ends=False)
    pair = CountingCommunicator(size=2)

    assert state.end_step(pair) == ()
    assert (state.num_steps, pair.num_all_reduces) == (1, 0)


def cut_layer(kind, comm, whole, size):
    """Return this rank's part of input, weight and gradient, and its scope."""
    input, weight, gradient = whole

    def part(tensor, dim):
        return tensor.tensor_split(size, dim)[comm.rank]

    if kind == "columns":
        scope = Scope(out_features=comm)
        return (input, part(weight, 0), part(gradient, 1)), scope
    if kind == "rows":
        return (part(input, 1), part(weight, 1), gradient), Scope(in_features=[comm])
    return (part(input, 0), weight, part(gradient, 0)), Scope(tokens=(comm,))


@pytest.mark.parametrize("kind", ["columns", "rows", "tokens"])
@pytest.mark.parametrize("recipe", ALL, ids=str)
@pytest.mark.parametrize("size", [2])
def test_parts_of_a_matrix_are_scaled_as_the_whole(recipe, kind, size):
    length = 128 * size
    # Each part has other magnitudes, so that a scale of its own would show.
    uneven = 1.0 + torch.arange(length)
    whole = (
        drawn(length, length) * uneven * uneven[:, None],
        drawn(length, length, seed=1) * uneven * uneven[:, None],
        drawn(length, length, seed=2) * uneven * uneven[:, None],
    )

    def quantize(comm):
        parts, scope = (whole, Scope()) if comm is None else cut_layer(kind, comm, whole, size)
        bound = Float8State(recipe, {"up": scope}).products["up"]
        return {
            (role, along): bound.operand(part, role, along, True).dequantize()
            for role, part in zip((Role.INPUT, Role.WEIGHT, Role.GRADIENT), parts, strict=True)
            for along in Along
        }

    serial = quantize(None)
    found = LocalWorld(size).run(quantize)

    for rank, operands in enumerate(found):
        for (role, along), operand in operands.items():
            matrix = serial[role, along] if along is Along.COLUMNS else serial[role, along].t()
            mine = operand if along is Along.COLUMNS else operand.t()
            for dim in (0, 1):
                if mine.shape[dim] != matrix.shape[dim]:
                    matrix = matrix.tensor_split(size, dim)[rank]
            assert torch.equal(mine, matrix)


@pytest.mark.parametrize(
    ("recipe", "block", "fitting"), [(Blockwise(), 128, "256 or 512"), (Mx(), 32, "320 or 384")]
)
def test_parts_that_end_within_a_block_are_refused_with_the_sizes_that_fit(recipe, block, fitting):
    def check(comm):
        linear = nn.Sequential(nn.Linear(8, 190 if block == 128 else 170))
        with pytest.raises(PrecisionError) as caught:
            convert_linears(linear, recipe, keep_ends=False, scope=Scope(out_features=comm))
        return str(caught.value)

    messages = LocalWorld(2).run(check)

    assert messages[0] == messages[1]
    assert f"within a block of {block} of the weight" in messages[0]
    assert f"out_features = {fitting} fit" in messages[0]


def test_tokens_that_end_within_a_block_are_refused_before_any_product():
    def check(comm):
        model = make_model()
        convert_linears(model, Blockwise(), keep_ends=False, scope=Scope(tokens=comm))
        with pytest.raises(PrecisionError, match=r"tokens are cut .* parts of 5.* = 256 fit"):
            model(drawn(5, 8))
        with torch.no_grad():  # no weight gradient: no block lies along tokens
            model(drawn(5, 8))

    LocalWorld(2).run(check)


def checkpointed(model, use_reentrant):
    return lambda x: checkpoint(model, x, use_reentrant=use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recipe", ALL, ids=str)
def test_recomputation_changes_no_history_code_or_gradient(recipe, use_reentrant, monkeypatch):
    def train(recomputes):
        codes = []

        def keep(first, second, dtype=torch.float32):
            codes.append((first.codes.clone(), second.codes.clone()))
            return scaled_product(first, second, dtype)

        monkeypatch.setattr(products, "scaled_product", keep)
        model = make_model()
        state = convert_linears(model, recipe, keep_ends=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        forward = checkpointed(model, use_reentrant) if recomputes else model
        for step in range(3):
            optimizer.zero_grad()
            for number in range(2):
                run(model, drawn(3, 8, seed=10 * step + number).requires_grad_(), forward)
            optimizer.step()
            state.end_step()
        return state, list(model.parameters()), codes

    state, parameters, codes = train(False)
    again, same_parameters, more_codes = train(True)

    assert same(state.histories(), again.histories())
    assert same(state.scales(), again.scales())
    for history in state.histories().values():
        assert int((history > 0).sum()) == 3  # of four entries
    assert all(torch.equal(a, b) for a, b in zip(parameters, same_parameters, strict=True))
    # Each of the 6 forwards of 2 layers is run once more, and gives codes that were there before.
    assert len(more_codes) == len(codes) + 6 * 2
    known = {tuple(c.numpy().tobytes() for c in pair) for pair in codes}
    assert {tuple(c.numpy().tobytes() for c in pair) for pair in more_codes} == known


@pytest.mark.parametrize("recipe", ALL, ids=str)
def test_the_first_forward_after_a_step_uses_the_new_weights(recipe):
    model = make_model()
    state = convert_linears(model, recipe, keep_ends=False)
    before = run(model, drawn(3, 8))
    state.end_step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.zero_()  # bumps no version

    assert before.any()
    assert not model(drawn(3, 8)).any()


def test_no_grad_and_eval_leave_the_history_alone():
    model = make_model()
    state = convert_linears(model, Delayed(), keep_ends=False)
    with torch.no_grad():
        model(drawn(3, 8, scale=100.0))
    run(model.eval(), drawn(3, 8, scale=100.0))

    state.end_step()

    assert not any(history.any() for history in state.histories().values())
    run(model.train(), drawn(3, 8))
    state.end_step()
    assert all(history[0] > 0 for history in state.histories().values())


def test_what_was_not_finite_teaches_nothing_and_is_named():
    model = make_model()
    state = convert_linears(model, Delayed(history=3), keep_ends=False)
    run(model, drawn(3, 8))
    assert state.end_step() == ()
    histories, scales = state.histories(), state.scales()
    poisoned = drawn(3, 8)
    poisoned[0, 0] = math.inf
    run(model, drawn(3, 8, seed=1))
    assert run(model, poisoned)[0].isnan().all()

    named = state.end_step()

    assert set(named) == {"0.input", "0.gradient", "2.input", "2.gradient"}
    for name in named:
        assert torch.equal(state.histories()[name], histories[name])
        assert torch.equal(state.scales()[name], scales[name])
    assert state.histories()["0.weight"][1] > 0


def test_a_step_that_is_discarded_leaves_no_trace():
    model = make_model()
    state = convert_linears(model, Delayed(history=3), keep_ends=False)
    run(model, drawn(3, 8))
    state.end_step()
    histories, scales = state.histories(), state.scales()
    expected = run(model, drawn(3, 8, seed=2))
    state.discard_step()
    run(model, drawn(3, 8, seed=1, scale=100.0))

    state.discard_step()

    assert same(state.histories(), histories)
    assert same(state.scales(), scales)
    assert torch.equal(run(model, drawn(3, 8, seed=2)), expected)
    state.end_step()
    assert float(state.histories()["0.input"][0]) == float(drawn(3, 8, seed=2).abs().max())


def test_ranks_agree_on_what_was_not_finite():
    def train(comm):
        model = make_model()
        state = convert_linears(model, Delayed(history=3), keep_ends=False)
        given = drawn(3, 8)
        if comm.rank == 1:
            given[0, 0] = math.nan
        run(model, given)
        return state.end_step(comm), not any(memory.any() for memory in state.histories().values())

    first, second = LocalWorld(2).run(train)

    assert first == second
    assert "0.input" in first[0]


def test_an_expert_without_tokens_is_scaled_by_its_first_ones():
    model = make_model()
    state = convert_linears(model, Delayed(history=2), keep_ends=False)
    for _ in range(3):
        run(model, drawn(0, 8))
        state.end_step()

    tiny = drawn(3, 8, scale=1e-6)
    found = model[0].float8.operand(tiny, Role.INPUT, Along.COLUMNS, False).dequantize()

    assert float((found - tiny).norm() / tiny.norm()) < 0.05


def test_a_resumed_run_is_bitwise_the_one_that_went_on():
    def build():
        model = make_model()
        return model, convert_linears(model, Delayed(history=3), keep_ends=False)

    model, state = build()
    for step in range(4):
        run(model, drawn(3, 8, seed=step, scale=2.0**-step))
        state.end_step()
    saved = copy.deepcopy(state.state_dict())
    resumed, resumed_state = build()
    run(resumed, drawn(3, 8, seed=9))  # begun and forgotten
    resumed_state.load_state_dict(saved)

    for step in range(4, 7):
        assert torch.equal(run(model, drawn(3, 8, seed=step)), run(resumed, drawn(3, 8, seed=step)))
        state.end_step()
        resumed_state.end_step()
        assert same(state.histories(), resumed_state.histories())
        assert same(state.scales(), resumed_state.scales())
    assert resumed_state.state_dict()["num_steps"] == 7


def test_a_state_is_not_saved_within_a_step_nor_loaded_into_other_layers():
    model = make_model()
    state = convert_linears(model, Delayed(history=3), keep_ends=False)
    saved = state.state_dict()
    run(model, drawn(3, 8))

    with pytest.raises(PrecisionError, match="call end_step before saving"):
        state.state_dict()
    other = Float8State(Delayed(history=3), {"up": Scope()})
    with pytest.raises(PrecisionError, match=r"9 differ, such as '0.gradient'"):
        other.load_state_dict(saved)
    longer = Float8State(Delayed(history=4), {"0": Scope(), "2": Scope()})
    with pytest.raises(PrecisionError, match=r"shape \[3\], that of the recipe 4 steps"):
        longer.load_state_dict(saved)


@pytest.mark.parametrize(
    "damage",
    [
        {"num_steps": -1},
        {"num_steps": None},
        {"history": 7},
        {"scale": None},
        {"history": {"up.input": [0.0], "up.weight": [0.0], "up.gradient": [0.0]}},
        {"scale": {"up.input": 1.0, "up.weight": 1.0, "up.gradient": 1.0}},
    ],
)
def test_a_state_of_other_things_than_tensors_is_refused_and_changes_nothing(damage):
    state = Float8State(Delayed(history=1), {"up": Scope()})
    before = state.state_dict()
    assert set(before["history"]) == {"up.input", "up.weight", "up.gradient"}

    with pytest.raises(PrecisionError):
        state.load_state_dict({**before, "num_steps": 3, **damage})
    with pytest.raises(PrecisionError, match="must hold num_steps, history, scale"):
        state.load_state_dict({})

    assert state.num_steps == 0


def test_a_backward_after_the_end_of_its_step_is_refused():
    model = make_model()
    state = convert_linears(model, Delayed(), keep_ends=False)
    output = model(drawn(3, 8))
    state.end_step()

    with pytest.raises(PrecisionError, match="end the step after the last backward"):
        output.sum().backward()


def test_a_step_cannot_end_over_fewer_ranks_than_a_layer_is_cut_over():
    def check(comm):
        state = Float8State(Delayed(), {"up": Scope(in_features=comm)})
        with pytest.raises(PrecisionError, match="layer up is cut over 2 ranks, but end_step was"):
            state.end_step()
        return state.end_step(comm)

    assert LocalWorld(2).run(check) == [(), ()]


def test_the_format_of_a_matrix_sets_its_scale():
    state = Float8State(Delayed(gradient=E4M3), {"up": Scope()})
    mixed = Float8State(Delayed(), {"up": Scope()})
    for found in (state, mixed):
        for role in Role:
            found.products["up"].operand(torch.ones(1, 1), role, Along.ROWS, True)
        found.end_step()

    assert [scale.item() for scale in state.scales().values()] == [448.0] * 3
    assert [scale.item() for scale in mixed.scales().values()] == [448.0, 448.0, 57344.0]
