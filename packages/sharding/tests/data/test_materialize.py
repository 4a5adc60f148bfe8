"""Models built without memory: every tensor gets its values once, whatever is sharded how."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding import ShardingError
from trainwright.sharding.data.materialize import Initializer, materialize, seeded_reset


class Rotary(nn.Module):
    """A module with a non-persistent buffer that follows from its sizes.

    Nothing is computed on the meta device: that would import a compiler.
    """

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("frequencies", torch.empty(width), persistent=False)
        self.register_buffer("steps", torch.empty((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        self.frequencies = torch.arange(self.width) / self.width
        self.steps.zero_()


class Table(nn.Embedding):
    """An embedding that begins uniform: a normal draw on the meta device imports a compiler."""

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight)
        self._fill_padding_idx_with_zero()


class Model(nn.Module):
    """Layers of many kinds, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Table(7, 4, padding_idx=0)
        self.rotary = Rotary()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])


@settings(max_examples=8)
@given(st.permutations(["embedding+head", "rotary", "blocks.0", "blocks.1", "norm"]))
def test_values_depend_on_names_and_seed_and_on_no_order_of_units(order: list[str]) -> None:
    whole = on_meta(Model)
    materialize(list(whole.named_modules()), "cpu", seeded_reset(5))

    by_units = on_meta(Model)
    for unit in order:
        roots = unit.split("+")
        chosen = [
            (name, module)
            for name, module in by_units.named_modules()
            if any(name == root or name.startswith(f"{root}.") for root in roots)
        ]
        materialize(chosen, "cpu", seeded_reset(5))

    for name, tensor in tensors_of(by_units).items():
        assert torch.equal(tensor, tensors_of(whole)[name]), name
    assert by_units.head.weight is by_units.embedding.weight


def test_foreign_modules_begin_as_their_own_reset_says() -> None:
    model = on_meta(Model)

    materialize(list(model.named_modules()), "cpu", seeded_reset(1))

    attention = model.blocks[0].self_attn
    assert not attention.out_proj.bias.any()
    assert not model.embedding.weight[0].any()
    assert torch.equal(model.norm.running_var, torch.ones(4))
    assert torch.equal(model.rotary.frequencies, torch.arange(4) / 4)
    assert "rotary.frequencies" not in model.state_dict()
    assert not torch.equal(model.blocks[0].linear1.weight, model.blocks[1].linear1.weight)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_recurrent_layers_compute_with_the_memory_that_they_got() -> None:
    model = on_meta(lambda: nn.LSTM(3, 2, num_layers=2))
    materialize([("x", model)], "cpu", seeded_reset(0))
    plain = nn.LSTM(3, 2, num_layers=2)
    plain.load_state_dict(model.state_dict())
    inputs = torch.ones(4, 3)

    assert torch.equal(model(inputs)[0], plain(inputs)[0])


def test_all_ranks_get_equal_values_and_the_global_generator_goes_on_as_before() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)

    def run(world: Communicator) -> dict[str, torch.Tensor]:
        model = on_meta(Model)
        materialize(list(model.named_modules()), world.device, seeded_reset(2))
        return tensors_of(model)

    first, *others = LocalWorld(4).run(run)

    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(first["head.weight"][1:], _head_of_seed(3)[1:])


def _head_of_seed(seed: int) -> torch.Tensor:
    model = on_meta(Model)
    materialize(list(model.named_modules()), "cpu", seeded_reset(seed))
    return model.head.weight


def test_the_first_owner_decides_what_a_tied_parameter_is() -> None:
    def tied() -> nn.ModuleDict:
        layers = nn.ModuleDict({name: nn.Linear(3, 3, bias=name == "b") for name in "ab"})
        layers["b"].weight = layers["a"].weight
        return layers

    def fill(name: str, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.fill_(ord(name))

    together, apart = on_meta(tied), on_meta(tied)
    materialize(list(together.named_modules()), "cpu", fill)
    for name in "ab":
        materialize([(name, apart[name])], "cpu", fill)

    for layers in (together, apart):
        assert layers["a"].weight is layers["b"].weight
        assert torch.equal(layers["a"].weight, torch.full((3, 3), float(ord("a"))))
        assert torch.equal(layers["b"].bias, torch.full((3,), float(ord("b"))))


def test_what_has_memory_is_left_alone_and_frozen_parameters_stay_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), on_meta(lambda: nn.Linear(2, 2)))
    model[1].weight.requires_grad_(False)
    before = model[0].weight.clone()
    parameters = list(model.parameters())
    called: list[str] = []

    def initialize(name: str, module: nn.Module) -> None:
        called.append(name)
        nn.init.ones_(module.weight)
        module.bias.data.fill_(2.0)

    materialize(list(model.named_modules()), "cpu", initialize)

    assert called == ["1"]
    assert torch.equal(model[0].weight, before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True]
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model[1].bias.grad, torch.ones(2))


class Holder(nn.Module):
    """A module that holds what a test gives it."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def leave(name: str, module: nn.Module) -> None:
    """Write nothing."""


def ones_in_the_first_row(name: str, module: nn.Module) -> None:
    module.weight[0].fill_(1.0)


def another_object(name: str, module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.ones(2, 3))


def with_attribute() -> nn.Module:
    module = nn.Linear(3, 2, bias=False)
    module.scale = torch.ones(2)
    return module


def with_hook() -> nn.Module:
    module = nn.Linear(3, 2, bias=False)
    module.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return module


@pytest.mark.parametrize(
    ("build", "initialize", "message"),
    [
        (lambda: nn.Linear(3, 2, bias=False), leave, "left 6 of 6 elements of the parameter x.w"),
        (lambda: nn.Linear(3, 2, bias=False), ones_in_the_first_row, "left 3 of 6 elements"),
        (lambda: nn.Linear(3, 2, bias=False), another_object, "replaced the parameter x.weight"),
        (lambda: Holder(b=torch.ones(2)), leave, "left 2 of 2 elements of the buffer x.b"),
        (lambda: Holder(b=torch.ones(2, dtype=torch.int64)), leave, "the buffer x.b without"),
        (
            lambda: Holder(b=torch.empty(2, dtype=torch.bool)),
            leave,
            "let it write b of Holder in place",
        ),
        (lambda: Holder(b=torch.ones(2)), seeded_reset(0), r"x \(Holder\) has no reset_param.* b "),
        (with_attribute, leave, "meta tensor scale.*use register_buffer"),
        (with_hook, leave, r"weight of x \(Linear\) has hooks.*register them after"),
    ],
)
def test_what_would_stay_without_values_is_named(
    build: Callable[[], nn.Module], initialize: Initializer, message: str
) -> None:
    with pytest.raises(ShardingError, match=message):
        materialize([("x", on_meta(build))], "cpu", initialize)


def test_an_initialiser_that_reaches_into_another_unit_is_named() -> None:
    model = on_meta(lambda: nn.MultiheadAttention(4, 2))

    with pytest.raises(ShardingError, match=r"attention \(Multihead.*attention.out_proj.bias.*one"):
        materialize([("attention", model)], "cpu", seeded_reset(0))


def test_empty_tensors_need_no_values_and_nothing_happens_without_meta_tensors() -> None:
    materialize([("x", on_meta(lambda: Holder(b=torch.ones(0, 3))))], "cpu", leave)
    materialize([("x", nn.Linear(2, 2))], "cpu", leave)


def test_modules_draw_one_after_the_other_even_on_many_threads() -> None:
    inside = threading.Lock()

    class Alone(nn.Linear):
        def reset_parameters(self) -> None:
            assert inside.acquire(blocking=False)
            super().reset_parameters()
            inside.release()

    models = [on_meta(lambda: nn.Sequential(*(Alone(3, 3) for _ in range(5)))) for _ in range(4)]

    LocalWorld(4).run(
        lambda world: materialize(list(models[world.rank].named_modules()), "cpu", seeded_reset(0))
    )

    assert all(torch.equal(models[0][4].weight, other[4].weight) for other in models)
