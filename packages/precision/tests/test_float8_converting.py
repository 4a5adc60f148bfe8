"""Layers are replaced in place, by name, and train like those in float32."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trainwright.precision import PrecisionError
from trainwright.precision.float8 import (
    Blockwise,
    Current,
    Delayed,
    Float8Linear,
    Float8State,
    Mx,
    PerRow,
    Scope,
    convert_linears,
)

ALL = (Delayed(history=4), Current(), PerRow(), Blockwise(), Mx())
by_recipe = pytest.mark.parametrize("recipe", ALL, ids=str)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_model(width=16, depth=4):
    layers = [nn.Linear(width, width) for _ in range(depth)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=number) * width**-0.5)
    return model


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


def test_first_and_last_layers_stay_high_and_names_stay_plain():
    model = make_model()
    parameters, names = list(model.parameters()), list(model.state_dict())
    saved = copy.deepcopy(model.state_dict())

    state = convert_linears(model, Current())

    assert converted(model) == ["1", "2"] == list(state.products)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    model.load_state_dict(saved)


def test_patterns_choose_and_keep_wins():
    model = make_model(depth=6)

    convert_linears(model, Current(), ["[0-3]", re.compile("4")], keep=["2"], keep_ends=False)

    assert converted(model) == ["0", "1", "3", "4"]


def test_a_second_conversion_knows_the_ends_of_the_whole_model():
    model = make_model()
    convert_linears(model, Current(), ["1"])

    convert_linears(model, PerRow(), ["2"])

    assert converted(model) == ["1", "2"]
    assert model[1].float8.recipe == Current()
    assert model[2].float8.recipe == PerRow()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"patterns": ["layers.*"]}, r"patterns pattern 'layers.\*' matches none of 4 .* such as"),
        ({"patterns": ["*"], "keep": ["up"]}, "keep pattern 'up' matches none"),
        ({"patterns": "*"}, "must be a sequence of patterns"),
        ({"patterns": ["0", "3"]}, "keep_ends=True keeps 0, 3"),
        ({"keep": ["*"]}, "nothing is left to replace of 4"),
    ],
)
def test_a_conversion_of_nothing_is_an_error_with_the_way_out(arguments, word):
    model = make_model()

    with pytest.raises(PrecisionError, match=word):
        convert_linears(model, Current(), **arguments)
    assert converted(model) == []


def test_a_pattern_that_matches_nothing_names_the_nearest_layers():
    model = nn.ModuleDict({"gate": nn.Linear(2, 2), "up_proj": nn.Linear(2, 2)})

    with pytest.raises(PrecisionError, match="such as up_proj"):
        convert_linears(model, Current(), ["up"], keep_ends=False)


def test_a_lone_layer_and_subclasses_are_not_replaced():
    class Own(nn.Linear):
        def forward(self, input):
            return super().forward(input) + 1.0

    with pytest.raises(PrecisionError, match="is a linear layer itself"):
        convert_linears(nn.Linear(2, 2), Current())
    model = nn.Sequential(Own(2, 2), nn.Linear(2, 2))
    convert_linears(model, Current(), keep_ends=False)
    assert converted(model) == ["1"]


def test_hooks_ties_and_shared_layers_survive():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": nn.Linear(4, 4), "c": shared})
    model["b"].weight = shared.weight
    seen = []
    handle = shared.register_forward_hook(lambda *given: seen.append(1))
    shared.eval()

    convert_linears(model, Current(), keep_ends=False)
    model["a"](drawn(2, 4))
    handle.remove()
    model["a"](drawn(2, 4))

    assert model["a"] is model["c"]
    assert model["a"].weight is model["b"].weight is shared.weight
    assert (seen, model["a"].training, model["b"].training) == ([1], False, True)


def test_a_copy_shares_scales_but_no_weights():
    model = make_model()
    convert_linears(model, Delayed())

    average = copy.deepcopy(model)

    assert average[1].float8 is model[1].float8
    assert average[1].weight is not model[1].weight
    assert torch.equal(average(drawn(2, 16)), model(drawn(2, 16)))


def test_a_layer_that_is_cut_is_told_so_by_its_name():
    asked = []

    convert_linears(make_model(), Current(), scope=lambda name: asked.append(name) or Scope())

    assert asked == ["1", "2"]


class SplitContext:
    """What a schedule that takes backwards apart lets an operation see."""

    def __init__(self, needs):
        self.needs_input_grad = needs
        self.saved_tensors = ()

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


class Interception(TorchFunctionMode):
    """Keeps the operation and its arguments."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if hasattr(getattr(func, "__self__", None), "weight_gradient"):
            self.operation, self.arguments = func.__self__, args
        return func(*args, **(kwargs or {}))


@by_recipe
def test_the_backward_comes_in_two_parts_that_are_the_whole(recipe):
    # Two layers alike: a history must not make one of the two backwards differ.
    whole, split = make_model(), make_model()
    whole_state = convert_linears(whole, recipe)
    split_state = convert_linears(split, recipe)
    input, gradient = drawn(40, 16).requires_grad_(), drawn(40, 16, seed=5) * 1e-3

    mode = Interception()
    with mode:
        output = split[1](input)
    operation, arguments = mode.operation, mode.arguments
    ctx = SplitContext([isinstance(a, torch.Tensor) and a.requires_grad for a in arguments])
    with torch.no_grad():
        again = operation.forward(ctx, *arguments)
        given = operation.input_gradient(ctx, gradient)
        # The weight may have been released meanwhile.
        ctx.saved_tensors = tuple(
            None if tensor is split[1].weight else tensor for tensor in ctx.saved_tensors
        )
        own = operation.weight_gradient(ctx, gradient)
    whole[1](input).backward(gradient)

    assert torch.equal(output, again)
    assert operation.weights == (1, 2)
    assert torch.equal(given[0], input.grad)
    assert all(value is None for value in given[1:])
    assert torch.equal(own[0], whole[1].weight.grad)
    assert torch.equal(own[1], whole[1].bias.grad)
    whole_state.end_step()
    split_state.end_step()
    for name, history in whole_state.histories().items():
        assert torch.equal(history, split_state.histories()[name])


@by_recipe
def test_the_products_of_parallel_layers_are_those_of_the_layer(recipe):
    linear = make_model()[1]
    plain = nn.Sequential(linear)
    convert_linears(plain, recipe, keep_ends=False)
    layer = plain[0]
    state = Float8State(recipe, {"up": Scope()})
    input, gradient = drawn(2, 20, 16).requires_grad_(), drawn(2, 20, 16, seed=5) * 1e-3
    layer.bias = None

    output = layer(input)
    output.backward(gradient)
    own = state.products["up"]

    assert torch.equal(own.output(input, linear.weight, records=True), output)
    assert torch.equal(own.input_gradient(gradient, linear.weight, records=True), input.grad)
    assert torch.equal(own.weight_gradient(gradient, input, records=True), linear.weight.grad)
    state.end_step()
    layer_memories = layer.float8.memories
    for role, _memory in own.memories.items():
        assert state.histories()[f"up.{role.value}"][0] == layer_memories[role].pending


class Block(nn.Module):
    """Attention with one head and a layer of units, each beside what came in."""

    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden):
        query, key, value = self.qkv(self.norms[0](hidden)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed)
        return hidden + self.down(nn.functional.gelu(self.up(self.norms[1](hidden))))


class Small(nn.Module):
    """A transformer over a few symbols."""

    def __init__(self, width=32, symbols=11, depth=1):
        super().__init__()
        self.enter = nn.Embedding(symbols, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, symbols)
        for number, parameter in enumerate(self.parameters()):
            if parameter.ndim > 1:
                values = drawn(*parameter.shape, seed=number)
                parameter.data.copy_(values * parameter.shape[1] ** -0.5)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, symbols):
        return self.leave(self.norm(self.blocks(self.enter(symbols))))


def train(recipe, steps=30):
    """Return the mean loss of the last five steps of learning a map of symbols."""
    model = Small()
    state = None
    if recipe is not None:
        state = convert_linears(model, recipe, ["blocks.*"], keep_ends=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        symbols = torch.randint(11, (2, 16), generator=generator)
        labels = (symbols + 3 * symbols.div(2, rounding_mode="floor")) % 11
        loss = nn.functional.cross_entropy(model(symbols).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state is not None:
            assert state.end_step() == ()
        losses.append(loss.item())
    return losses[0], sum(losses[-5:]) / 5


def test_a_transformer_trains_under_each_recipe_as_in_float32():
    first, plain = train(None)

    assert plain < first / 2
    for recipe in ALL:
        begun, ended = train(recipe)
        # Of what was learnt, not more than a twentieth is lost.
        assert abs(begun - first) < 0.05 * first
        assert abs(ended - plain) < 0.05 * (first - plain), (recipe, plain, ended)
        assert ended != plain
