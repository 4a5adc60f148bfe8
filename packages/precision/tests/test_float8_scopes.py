"""Parts of layers and of tokens are scaled as the whole, or refused alike on every rank."""

import pytest
import torch
from torch import nn

from trainwright.collectives import LocalWorld
from trainwright.precision import PrecisionError
from trainwright.precision.float8 import (
    Blockwise,
    Current,
    Delayed,
    Float8State,
    Scope,
    convert_linears,
    recipes,
)


def drawn(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def make_model(width=8):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


@pytest.mark.parametrize(
    ("shape", "options", "fits"),
    [
        ((2, 128), {}, True),
        ((2, 64), {}, False),  # 128 tokens, but of two sequences
        ((64, 2), {"token_dim": 0}, True),
        ((2, 256), {"token_runs": 2}, True),
        ((1, 128), {"token_runs": 2}, False),
    ],
)
def test_blocks_of_tokens_are_those_of_neighbouring_tokens(shape, options, fits):
    def check(comm):
        model = make_model()
        scope = Scope(tokens=comm, **options)
        convert_linears(model, Blockwise(), keep_ends=False, scope=scope)
        if fits:
            return model(drawn(*shape, 8)).shape == (*shape, 8)
        with pytest.raises(PrecisionError, match=r"layer 0: its tokens are cut over 2 ranks") as e:
            model(drawn(*shape, 8))
        return f"tokens = {256 * options.get('token_runs', 1)} fit" in str(e.value)

    assert LocalWorld(2).run(check) == [True, True]


class Layer(nn.Module):
    """A layer of elsewhere that takes products."""

    def __init__(self, comm, dim="out_features", ranges=None, size=8):
        super().__init__()
        self.in_features = self.out_features = 8
        setattr(self, dim, size)
        self.products = None
        self.cuts = {dim: (comm, ranges)}

    def feature_cuts(self):
        return self.cuts


class Parts:
    """Which features each rank has."""

    def __init__(self, size, *ranges):
        self.size, self.ranges = size, ranges


def test_layers_that_take_products_are_given_theirs_beside_plain_ones():
    def check(comm):
        model = nn.Sequential(nn.Linear(8, 8), Layer(comm), Layer(comm, "in_features"), nn.Tanh())
        state = convert_linears(
            model, Current(), lambda name, layer: name != "0", keep_ends=(True, False)
        )
        assert type(model[0]) is nn.Linear
        assert [model[1].products, model[2].products] == list(state.products.values())
        assert (model[1].products.scope.out_features, model[1].products.scope.in_features) == (
            (comm,),
            (),
        )
        assert model[2].products.scope.in_features == (comm,)
        with pytest.raises(PrecisionError, match="nothing is left to replace"):
            convert_linears(model, Current(), lambda name, layer: name in "12")
        with pytest.raises(PrecisionError, match="layer 0 says itself over which ranks"):
            convert_linears(
                nn.Sequential(Layer(comm)), Current(), keep_ends=False, scope=Scope(None, comm)
            )

    LocalWorld(2).run(check)


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        (Parts(300, [(0, 128)], [(128, 300)]), None),
        (Parts(256, [(0, 256)], []), None),
        (Parts(384, [(0, 128), (256, 384)], [(128, 256)]), None),
        (Parts(300, [(0, 150)], [(150, 300)]), "parts that meet at 150.* = 256 or 512 fit"),
        (Parts(300, [(0, 256)], [(256, 290), (290, 300)]), "parts that meet at 290"),
        (Parts(300, [(256, 300), (0, 128)], [(128, 256)]), "parts that meet at 300"),
    ],
)
def test_uneven_parts_end_where_blocks_end_or_every_rank_says_so(parts, word):
    def check(comm):
        model = nn.Sequential(Layer(comm, "out_features", parts, parts.size))
        if word is None:
            convert_linears(model, Blockwise(), keep_ends=False)
            return "fits"
        with pytest.raises(PrecisionError, match=word) as caught:
            convert_linears(model, Blockwise(), keep_ends=False)
        assert model[0].products is None
        return str(caught.value)

    first, second = LocalWorld(2).run(check)

    assert first == second


def test_what_was_measured_serves_the_three_products_of_a_forward_and_one_backward(monkeypatch):
    num_agreed = []
    agree = recipes.largest_over
    monkeypatch.setattr(recipes, "largest_over", lambda *a: num_agreed.append(1) or agree(*a))
    bound = Float8State(Current(), {"up": Scope()}).products["up"]
    input, weight, kept = drawn(3, 8), drawn(4, 8), {}
    bound.output(input, weight, records=True, kept=kept)
    assert len(num_agreed) == 2

    first, second = drawn(3, 4), drawn(3, 4, scale=9.0)
    for gradient in (first, second):  # two backwards through one forward
        bound.input_gradient(gradient, weight, records=True, kept=kept)
        found = bound.weight_gradient(gradient, input, records=True, kept=kept)

    assert len(num_agreed) == 2 + 2
    assert torch.equal(found, bound.weight_gradient(second, input, records=True))


def test_a_backward_of_given_products_after_the_end_of_its_step_is_refused():
    state = Float8State(Delayed(), {"up": Scope()})
    bound, kept = state.products["up"], {}
    bound.output(drawn(3, 8), drawn(4, 8), records=True, kept=kept)
    state.end_step()

    with pytest.raises(PrecisionError, match="end the step after the last backward"):
        bound.weight_gradient(drawn(3, 4), drawn(3, 8), records=True, kept=kept)
