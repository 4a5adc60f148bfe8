"""A policy applied to a plain module: what is cast, what is left, what is seen."""

import math
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.precision import DtypePolicy, PrecisionError, policy
from trainwright.precision.casting import cast_floating

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CAST_COPIES = DtypePolicy(FP32, BF16, FP32, FP32)


def watch(module):
    """Record the dtypes of a module's inputs, weight and output in its forward."""
    seen = []
    module.register_forward_hook(
        lambda m, args, out: seen.append((args[0].dtype, m.weight.dtype, out.dtype))
    )
    return seen


class Rotary(nn.Module):
    def __init__(self, dim=32, base=10000.0):
        super().__init__()
        self.register_buffer("frequencies", base ** -(torch.arange(0, dim, 2) / dim))

    def forward(self, positions):
        return (positions[:, None] * self.frequencies).cos()


def test_kept_modules_compute_in_float32_between_narrow_ones():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    policy("bfloat16", keep_fp32=["1.*"]).apply(model)
    seen = [watch(module) for module in model]

    output = model(torch.randn(2, 4))

    assert seen == [[(BF16, BF16, BF16)], [(FP32, FP32, FP32)], [(BF16, BF16, BF16)]]
    assert output.dtype == FP32


def test_parameters_are_cast_in_place_and_lost_digits_are_handed_over():
    model = nn.ModuleDict({"up": nn.Linear(3, 3), "norm": nn.LayerNorm(3)})
    objects = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in objects.items()}

    applied = policy("bfloat16", keep_fp32=["norm.*"]).apply(model)

    assert dict(model.named_parameters()) == objects
    assert applied.dtypes == {
        "up.weight": BF16,
        "up.bias": BF16,
        "norm.weight": FP32,
        "norm.bias": FP32,
    }
    assert set(applied.originals) == {"up.weight", "up.bias"}
    for name, original in applied.originals.items():
        assert torch.equal(original, before[name])
        assert torch.equal(original.bfloat16(), objects[name])


def test_what_is_kept_of_a_float64_model_stays_float64():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).double()

    policy("bfloat16", keep_fp32=["1.*"]).apply(model)

    assert [p.dtype for p in model.parameters()] == [BF16, BF16, FP64, FP64]
    assert model(torch.ones(1, 2, dtype=FP64)).dtype == FP32


def test_the_float64_policy_keeps_nothing_below_float64():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))

    policy("float64", keep_fp32=["1.*"]).apply(model)

    assert {p.dtype for p in model.parameters()} == {FP64}
    assert model(torch.ones(1, 2)).dtype == FP64


def test_rotary_angles_stay_right_at_large_positions():
    model = nn.ModuleDict({"rotary": Rotary(), "up": nn.Linear(2, 2)})
    positions = torch.arange(2048)
    exact = (positions.double()[:, None] * 10000.0 ** -(torch.arange(0, 32, 2).double() / 32)).cos()

    policy("bfloat16").apply(model)

    assert model["up"].weight.dtype == BF16
    assert (model["rotary"](positions).double() - exact).abs().max() < 1e-3
    halved = (positions[:, None].half() * model["rotary"].frequencies.half()).cos()
    assert (halved.double() - exact).abs().max() > 0.5


def test_cast_copies_see_a_weight_that_was_changed_in_place():
    linear = nn.Linear(1, 1, bias=False)
    CAST_COPIES.apply(linear)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    x = torch.ones(1, 1)
    with torch.no_grad():
        linear.weight.fill_(1.0)
    first = linear(x)
    with torch.no_grad():
        linear.weight.fill_(2.0)

    second = linear(x)
    second.sum().backward()
    optimizer.step()

    assert second.item() == 2 * first.item()
    assert linear(x).item() == 1.0


def test_cast_copies_compute_narrow_and_accumulate_gradients_in_float32():
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    CAST_COPIES.apply(model)
    seen = watch(model[0])

    for value in [1.0] + [2.0**-9] * 256:
        model(torch.full((1, 1), value)).sum().backward()

    assert set(seen) == {(BF16, FP32, BF16)}
    assert model[0].weight.dtype == FP32
    assert model[0].weight.grad.item() == 1.5


def test_cast_copies_round_each_weight_once():
    linear = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    expected = nn.functional.linear(
        x.bfloat16(), linear.weight.bfloat16(), linear.bias.bfloat16()
    ).float()

    CAST_COPIES.apply(linear)

    assert torch.equal(linear(x), expected)


def test_cast_copies_come_off_again_when_a_forward_raises():
    class Broken(nn.Linear):
        def forward(self, x):
            raise ArithmeticError("on purpose")

    broken = Broken(2, 2)
    CAST_COPIES.apply(broken)

    with pytest.raises(ArithmeticError, match="on purpose"):
        broken(torch.ones(1, 2))

    assert [type(p) for _, p in broken.named_parameters()] == [nn.Parameter] * 2
    assert broken.weight.dtype == FP32


@pytest.mark.parametrize("rules", [CAST_COPIES, policy("bfloat16")])
def test_recomputation_changes_no_bit(rules):
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    rules.apply(model)
    x = torch.randn(3, 4)
    gradients = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        model.zero_grad()
        run(x).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])

    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_tied_weight_is_kept_if_any_of_its_names_is():
    embedding = nn.Embedding(4, 2)
    head = nn.Linear(2, 4, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head})

    applied = policy("bfloat16", keep_fp32=["head.*"]).apply(model)

    assert applied.dtypes == {"embedding.weight": FP32, "head.weight": FP32}
    assert head.weight is embedding.weight


def test_a_module_that_would_mix_dtypes_is_refused_and_nothing_is_changed():
    model = nn.Sequential(nn.Linear(2, 2))

    with pytest.raises(PrecisionError, match=r"module '0' would compute with weight in torch\.b"):
        policy("bfloat16", keep_fp32=["*.bias"]).apply(model)

    assert model[0].weight.dtype == FP32


def test_a_policy_after_the_first_backward_is_refused():
    linear = nn.Linear(2, 2)
    linear(torch.ones(1, 2)).sum().backward()

    with pytest.raises(PrecisionError, match="before the first backward"):
        policy("bfloat16").apply(linear)

    assert linear.weight.dtype == FP32


def test_integer_inputs_buffers_and_nested_outputs_are_left_in_shape():
    pair = namedtuple("pair", "a b")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(3, 2)
            self.register_buffer("scale", torch.ones(1, dtype=FP64))

        def forward(self, ids, *, extra):
            hidden = self.table(ids)
            return {"hidden": [hidden, ids], "pair": pair(hidden, extra["x"]), "none": None}

    model = Model()
    policy("bfloat16").apply(model)

    output = model(torch.tensor([0, 2]), extra={"x": torch.ones(1, dtype=FP64)})

    assert model.scale.dtype == FP64
    assert [t.dtype for t in output["hidden"]] == [FP32, torch.int64]
    assert isinstance(output["pair"], pair)
    assert output["pair"].b.dtype == FP32
    assert output["none"] is None


def test_keyword_inputs_are_cast_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 2))

        def forward(self, *, x):
            self.seen = x.dtype
            return x * self.weight

    model = Scaled()
    policy("bfloat16").apply(model)
    model(x=torch.ones(2))

    assert model.seen == BF16


@pytest.mark.parametrize("rules", [CAST_COPIES, policy("bfloat16", keep_fp32=["1.*"])])
def test_remove_takes_all_casts_off(rules):
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    applied = rules.apply(model)

    applied.remove()
    model.double()

    assert model(torch.ones(1, 2, dtype=FP64)).dtype == FP64


def test_cast_floating_leaves_what_is_not_a_floating_tensor():
    value = {"a": [torch.ones(1), 3, "x"], "b": (torch.tensor(1),)}

    cast = cast_floating(value, FP64)

    assert cast["a"][0].dtype == FP64
    assert cast["a"][1:] == [3, "x"]
    assert cast["b"][0].dtype == torch.int64
    assert math.isclose(cast["a"][0].item(), 1.0)
