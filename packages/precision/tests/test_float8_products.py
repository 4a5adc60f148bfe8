"""All three products of a linear layer take code points times scales, and lose nothing unseen."""

import math

import pytest
import torch
from torch import nn

from trainwright.precision import PrecisionError
from trainwright.precision.float8 import (
    Along,
    Blockwise,
    Current,
    Delayed,
    Float8Linear,
    Float8State,
    Mx,
    PerRow,
    Role,
    Scope,
    products,
    scaled_product,
)
from trainwright.precision.formats import E4M3, E5M2, FP16, BlockQuantized, floor_exponent

RECIPES = (
    Delayed(),
    Delayed(history=2, margin=1, gradient=E4M3),
    Current(),
    Current(power_of_two=True),
    PerRow(),
    PerRow(gradient=E4M3),
    Blockwise(),
    Blockwise(gradient=E5M2, power_of_two=True),
    Mx(),
    Mx(floor_exponent, gradient=E5M2),
)
by_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)
by_kind = pytest.mark.parametrize("recipe", RECIPES[::2], ids=str)


def make_linear(recipe, inputs=160, outputs=136, bias=True, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(inputs + outputs)
    linear = nn.Linear(1, 1, bias=bias)
    linear.in_features, linear.out_features = inputs, outputs
    shapes = {"weight": (outputs, inputs), "bias": (outputs,)}
    for name in dict(linear.named_parameters()):
        values = torch.randn(shapes[name], generator=generator) * scale
        setattr(linear, name, nn.Parameter(values.to(dtype)))
    return Float8Linear(linear, Float8State(recipe, {"up": Scope()}).products["up"])


def drawn(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def intercept(monkeypatch):
    """Keep the operands of all products."""
    seen = []

    def keep(first, second, dtype=torch.float32):
        seen.append((first, second))
        return scaled_product(first, second, dtype)

    monkeypatch.setattr(products, "scaled_product", keep)
    return seen


def spread(operand):
    """Return the scale of each element, read from the block that it lies in."""
    rows, cols = operand.codes.shape
    of_row = torch.arange(rows) // operand.block[0]
    of_col = torch.arange(cols) // operand.block[1]
    return operand.scale_values()[of_row][:, of_col]


def plain_product(first, second):
    a, b = (q.format.decode(q.codes) * spread(q) for q in (first, second))
    return a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()


def assert_near(found, first, second):
    # Each of K terms is rounded once and added at most K times.
    exact, sizes = plain_product(first, second)
    limit = (first.codes.shape[1] + 2) * torch.finfo(torch.float32).eps * sizes
    assert bool(((found.double() - exact).abs() <= limit + 1e-45).all())


@by_recipe
def test_all_three_products_multiply_code_points_times_their_scales(recipe, monkeypatch):
    linear = make_linear(recipe, bias=False)
    seen = intercept(monkeypatch)
    input = drawn(3, 50, 160).requires_grad_()
    gradient = drawn(3, 50, 136, seed=1, scale=1e-3)

    output = linear(input)
    output.backward(gradient)

    assert len(seen) == 3
    given = {
        "output": (input.flatten(0, 1), linear.weight),
        "input gradient": (gradient.flatten(0, 1), linear.weight.t()),
        "weight gradient": (gradient.flatten(0, 1).t(), input.flatten(0, 1).t()),
    }
    found = (output.flatten(0, 1), input.grad.flatten(0, 1), linear.weight.grad)
    for (what, wide), operands, result in zip(given.items(), seen, found, strict=True):
        for values, operand in zip(wide, operands, strict=True):
            assert isinstance(operand, BlockQuantized), what
            assert operand.codes.dtype == torch.uint8
            assert operand.codes.shape == values.shape
            points = operand.format.code_points(dtype=torch.float32)
            assert torch.equal(operand.dequantize(), points[operand.codes.long()] * spread(operand))
            # Within half a step of the format, at the scale of the largest number of the block;
            # a floored exponent saturates up to an eighth below.
            steps = (values - operand.dequantize()).abs() / spread(operand)
            worst = 2.0 ** (operand.format.emax - operand.format.mantissa_bits)
            assert float(steps.detach().max()) <= worst * (2 if "floor" in str(recipe) else 0.5001)
        assert_near(result, *operands)
    formats = [tuple(operand.format for operand in pair) for pair in seen]
    backward = recipe.gradient
    assert formats == [(E4M3, E4M3), (backward, E4M3), (backward, E4M3)]


@by_recipe
def test_coarse_operands_show_in_each_of_the_three_products(recipe):
    # A product of operands that were left alone would equal the plain one.
    linear = make_linear(recipe, bias=False)
    input, gradient = drawn(40, 160).requires_grad_(), drawn(40, 136, seed=1)

    output = linear(input)
    output.backward(gradient)

    plain = (input @ linear.weight.t(), gradient @ linear.weight, gradient.t() @ input)
    for found, exact in zip((output, input.grad, linear.weight.grad), plain, strict=True):
        error = float(((found - exact).norm() / exact.norm()).detach())
        assert 0.01 < error < 0.1


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.name)
@pytest.mark.parametrize("shape", [(32, 64, 48), (5, 7, 3), (1, 1, 1), (4, 300, 1), (1, 20, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_kernel_and_decoded_products_agree(format, shape, dtype, monkeypatch):
    rows, depth, columns = shape
    for recipe in (Current(gradient=format), PerRow(gradient=format), Current(power_of_two=True)):
        bound = Float8State(recipe, {"up": Scope()}).products["up"]
        first = bound.operand(drawn(rows, depth), Role.GRADIENT, Along.COLUMNS, False)
        second = bound.operand(drawn(columns, depth, seed=1), Role.WEIGHT, Along.COLUMNS, False)
        found = scaled_product(first, second, dtype)
        with monkeypatch.context() as patch:
            patch.setattr(products, "kernel_takes", lambda *given: False)
            decoded = scaled_product(first, second, dtype)

        exact, sizes = plain_product(first, second)
        assert products.kernel_takes(first, second, dtype) == (dtype is not torch.float64)
        assert found.dtype == decoded.dtype == dtype
        limit = (depth + 2) * torch.finfo(torch.float32).eps * sizes
        limit = limit + torch.finfo(dtype).eps * exact.abs()
        for result in (found, decoded):
            assert bool(((result.double() - exact).abs() <= limit).all())


def test_operands_of_other_depths_are_refused():
    bound = Float8State(Current(), {"up": Scope()}).products["up"]
    first = bound.operand(drawn(3, 4), Role.INPUT, Along.COLUMNS, False)
    second = bound.operand(drawn(3, 5), Role.WEIGHT, Along.COLUMNS, False)

    with pytest.raises(PrecisionError, match=r"\[N, K\] and \[P, K\], got \[3, 4\] and \[3, 5\]"):
        scaled_product(first, second)


@by_kind
def test_zeros_come_out_as_zeros_and_leave_scales_finite(recipe, monkeypatch):
    linear = make_linear(recipe, bias=False)
    seen = intercept(monkeypatch)
    input = torch.zeros(4, 160, requires_grad=True)

    output = linear(input)
    output.backward(torch.zeros(4, 136))

    assert not output.any()
    assert not input.grad.any()
    assert not linear.weight.grad.any()
    for operand in (operand for pair in seen for operand in pair):
        scales = operand.scale_values()
        assert bool((scales.isfinite() & (scales > 0)).all())


@by_kind
def test_a_zero_row_beside_others_stays_zero(recipe):
    linear = make_linear(recipe, inputs=2, outputs=2, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(2))

    output = linear(torch.tensor([[0.0, 0.0], [1.0, -2.0]]))

    assert output.tolist()[0] == [0.0, 0.0]
    assert torch.allclose(output[1], torch.tensor([1.0, -2.0]), rtol=1e-6)


@by_kind
@pytest.mark.parametrize("size", [1e-40, 1e-6, 1e30])
def test_tiny_and_huge_inputs_stay_finite_with_their_digits(recipe, size):
    linear = make_linear(recipe, inputs=64, outputs=32, bias=False)
    input = (drawn(8, 64) * size).requires_grad_()

    output = linear(input)
    output.backward(drawn(8, 32, seed=2) / max(size, 1e-30))

    exact = input.double() @ linear.weight.double().t()
    assert bool(output.isfinite().all() and input.grad.isfinite().all())
    assert bool(linear.weight.grad.isfinite().all())
    # Subnormal numbers of float32 have few digits of their own.
    error = float(((output - exact).norm() / exact.norm()).detach())
    assert error < (0.1 if size > 1e-38 else 1.0)


def test_a_subnormal_amax_gives_a_finite_scale_and_exact_zeros():
    bound = Float8State(Current(), {"up": Scope()}).products["up"]

    operand = bound.operand(torch.tensor([[1e-40, 0.0]]), Role.INPUT, Along.COLUMNS, False)

    assert math.isfinite(operand.scales.item())
    assert operand.scales.item() > 0
    assert bool(operand.dequantize().isfinite().all())
    assert operand.dequantize()[0, 1] == 0.0


@by_kind
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_not_finite_comes_out_as_nan(recipe, bad):
    linear = make_linear(recipe, bias=False)
    # With and without a scale that is known before the matrix is.
    for memory in linear.float8.memories.values():
        memory.is_blank = math.isnan(bad)
    poisoned = drawn(40, 160)
    poisoned[3, 5] = bad
    input = poisoned.requires_grad_()
    gradient = drawn(40, 136, seed=1)
    gradient[7, 9] = bad

    output = linear(input)
    output.backward(gradient)

    assert bool(output[3].isnan().all())
    assert bool(input.grad[7].isnan().all())
    assert bool(linear.weight.grad[:, 5].isnan().all() and linear.weight.grad[9].isnan().all())
    with torch.no_grad():
        linear.weight[11, 2] = bad
    assert bool(linear(drawn(40, 160))[:, 11].isnan().all())


@by_kind
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_no_tokens_give_no_outputs_and_zero_weight_gradients(recipe, shape):
    linear = make_linear(recipe)
    input = torch.zeros(*shape, 160, requires_grad=True)

    output = linear(input)
    output.sum().backward()

    assert output.shape == (*shape, 136)
    assert input.grad.shape == input.shape
    assert not linear.weight.grad.any()
    assert not linear.bias.grad.any()


@by_kind
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_a_layer_without_features_computes_what_a_plain_one_does(recipe, sizes):
    linear = make_linear(recipe, *sizes)
    input = drawn(3, sizes[0]).requires_grad_()

    output = linear(input)
    output.sum().backward()

    assert torch.equal(output, nn.functional.linear(input, linear.weight, linear.bias))
    assert input.grad.shape == input.shape
    assert not input.grad.any()


@by_kind
def test_a_vector_and_leading_dims_give_the_shapes_of_a_plain_layer(recipe):
    linear = make_linear(recipe, inputs=8, outputs=4)

    vector, cube = linear(drawn(8)), linear(drawn(2, 3, 5, 8))

    assert vector.shape == (4,)
    assert cube.shape == (2, 3, 5, 4)


@by_kind
def test_only_the_gradients_that_are_wanted_are_multiplied(recipe, monkeypatch):
    linear = make_linear(recipe)
    seen = intercept(monkeypatch)

    linear(drawn(4, 160)).sum().backward()
    of_frozen_input = len(seen)
    linear.weight.requires_grad_(False)
    input = drawn(4, 160).requires_grad_()
    linear(input).sum().backward()

    assert of_frozen_input == 2
    assert len(seen) == 4
    assert input.grad is not None
    assert torch.equal(linear.bias.grad, torch.full((136,), 8.0))


@by_kind
def test_a_transposed_input_is_quantised_like_a_contiguous_one(recipe):
    linear = make_linear(recipe)
    input = drawn(160, 20)

    assert torch.equal(linear(input.t()), linear(input.t().contiguous()))


def test_autocast_chooses_the_output_and_not_the_operands(monkeypatch):
    linear = make_linear(Blockwise(), bias=False)
    input = drawn(6, 160).requires_grad_()
    seen = intercept(monkeypatch)

    with torch.autocast("cpu", torch.bfloat16):
        output = linear(input)
    plain = linear(input.detach())

    assert output.dtype == torch.bfloat16
    assert torch.equal(output, plain.bfloat16())
    assert torch.equal(seen[0][0].codes, seen[1][0].codes)
    output.float().sum().backward()
    assert input.grad.dtype == linear.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@by_kind
def test_outputs_and_gradients_have_the_dtypes_of_what_they_belong_to(recipe, dtype):
    linear = make_linear(recipe, inputs=32, outputs=16, dtype=dtype)
    input = drawn(6, 32).to(dtype).requires_grad_()

    output = linear(input)
    output.sum().backward()

    assert output.dtype == input.grad.dtype == linear.weight.grad.dtype == dtype
    plain = nn.functional.linear(input.float(), linear.weight.float(), linear.bias.float())
    assert float(((output - plain).norm() / plain.norm()).detach()) < 0.1


def test_second_derivatives_are_refused_and_not_zero():
    linear = make_linear(Current())
    input = drawn(4, 160).requires_grad_()

    (gradient,) = torch.autograd.grad(linear(input).square().sum(), input, create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_what_is_no_input_is_refused_by_name():
    linear = make_linear(Current())

    with pytest.raises(PrecisionError, match=r"layer up wants .*160\], got torch.float32 of .*159"):
        linear(drawn(4, 159))
    with pytest.raises(PrecisionError, match="layer up wants floating-point"):
        linear(torch.ones(4, 160, dtype=torch.long))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Delayed(history=0), "history is a number of steps"),
        (lambda: Delayed(margin=-1), "margin must be 0 to 64"),
        (lambda: Current(forward=FP16), "forward must be E4M3 or E5M2, got 'FP16'"),
        (lambda: Blockwise(gradient="E4M3"), "gradient must be E4M3 or E5M2"),
        (lambda: Scope(tokens=3), "communicator"),
    ],
)
def test_recipes_are_refused_where_they_are_made(make, word):
    with pytest.raises(PrecisionError, match=word):
        make()


def test_recipes_are_values():
    assert Delayed(history=4) == Delayed(history=4) != Delayed(history=5)
    assert len({Current(), Current(), PerRow(), Blockwise(), Mx()}) == 4
    assert str(Mx()) == "Mx(forward=E4M3, rule=ceil_exponent, gradient=E4M3)"
