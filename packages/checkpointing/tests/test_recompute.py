"""A recomputed function behaves as the function itself, whatever it is given."""

import contextlib
import contextvars
import dataclasses
from collections import namedtuple

import attrs
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trainwright.checkpointing.activations import recompute, recompute_all
from trainwright.checkpointing.errors import ReplayError


def test_a_block_whose_input_needs_no_gradient_still_gives_its_parameters_theirs():
    linear = nn.Linear(4, 3)
    x = torch.randn(5, 4)

    y = recompute(linear)(x)
    y.sum().backward()

    assert y.requires_grad
    assert torch.equal(linear.weight.grad, x.sum(0).expand(3, 4))
    assert torch.equal(linear.bias.grad, torch.full((3,), 5.0))


def test_output_needs_a_gradient_only_where_the_plain_output_would():
    frozen = nn.Linear(4, 3).requires_grad_(False)
    assert not recompute(frozen)(torch.ones(1, 4)).requires_grad
    with torch.no_grad():
        assert not recompute(nn.Linear(4, 3))(torch.ones(1, 4)).requires_grad


def test_recomputation_runs_in_the_autocast_dtype_of_the_forward():
    dtypes = []

    class Recording(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            inner = self.linear(x)
            dtypes.append(inner.dtype)
            return torch.tanh(inner).square()

    module = Recording()
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        plain = module(x)
        checkpointed = recompute(module)(x)
    with torch.autocast("cpu", torch.float16):
        plain.sum().backward()
        expected = [p.grad for p in module.parameters()]
        module.zero_grad()
        checkpointed.sum().backward()

    assert dtypes == [torch.bfloat16] * 3
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True))


MODE = contextvars.ContextVar("MODE", default="plain")
SCALE = contextvars.ContextVar("SCALE", default=1)
FLAG = {"value": "off"}


@contextlib.contextmanager
def _set(variable, value):
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def _flag(value):
    before = FLAG["value"]
    FLAG["value"] = value
    try:
        yield
    finally:
        FLAG["value"] = before


def _capture_flag():
    value = FLAG["value"]
    return lambda: _flag(value)


def _square_noting(records):
    def square(x):
        records.append((MODE.get(), SCALE.get(), FLAG["value"]))
        return (x * 2).square()

    return square


def test_nested_context_variables_of_the_forward_hold_in_the_recomputation():
    records = []
    x = torch.ones(2, requires_grad=True)

    with _set(MODE, "q"), _set(SCALE, 7):
        y = recompute(_square_noting(records))(x)
    y.sum().backward()

    assert records == [("q", 7, "off"), ("q", 7, "off")]
    assert MODE.get() == "plain"


def test_registered_captures_are_entered_again_and_left_again():
    records = []
    x = torch.ones(2, requires_grad=True)

    with _flag("fp8"):
        y = recompute(_square_noting(records), captures=[_capture_flag])(x)
    y.sum().backward()

    assert records == [("plain", 1, "fp8"), ("plain", 1, "fp8")]
    assert FLAG["value"] == "off"


def test_what_captures_set_ends_with_the_layer_and_what_the_layer_sets_stays():
    x = torch.ones(2, requires_grad=True)

    def capture():
        SCALE.set(SCALE.get() + 1)
        return contextlib.nullcontext

    def layer(x):
        MODE.set(f"set where the scale is {SCALE.get()}")
        return x.square()

    def work():
        recompute(layer, captures=[capture])(x)
        return SCALE.get(), MODE.get()

    assert contextvars.copy_context().run(work) == (1, "set where the scale is 2")


def test_policies_hand_captures_to_every_layer():
    records = []
    x = torch.ones(2, requires_grad=True)
    layers = [_square_noting(records), _square_noting(records)]

    with _flag("fp8"):
        y = recompute_all(captures=[_capture_flag])(layers, x)
    y.sum().backward()

    assert records == [("plain", 1, "fp8")] * 4


def test_flags_that_change_what_kernels_compute_are_those_of_the_forward_in_the_recomputation():
    flags = []

    def noting(x):
        flags.append(
            (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision())
        )
        return (x * 2).square()

    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    try:
        y = recompute(noting)(torch.ones(2, requires_grad=True))
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_float32_matmul_precision(before[1])
    y.sum().backward()

    assert flags == [(True, "high")] * 2
    after = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    assert after == before


class CountingMode(TorchFunctionMode):
    """Doubles every sine and counts them."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.sin:
            self.calls += 1
            return 2 * func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("still_active", [False, True])
def test_function_modes_of_the_forward_act_once_in_the_recomputation(still_active):
    mode = CountingMode()
    x = torch.tensor(0.5, requires_grad=True)

    with mode:
        y = recompute(lambda x: torch.sin(x).square())(x)
    with mode if still_active else contextlib.nullcontext():
        y.backward()

    assert mode.calls == 2
    plain = torch.tensor(0.5, requires_grad=True)
    (2 * torch.sin(plain)).square().backward()
    assert torch.equal(x.grad, plain.grad)


def test_tensors_in_dictionaries_and_keywords_keep_their_gradients():
    w = torch.tensor(5.0, requires_grad=True)
    x = torch.tensor(2.0, requires_grad=True)

    out = recompute(lambda d: {"y": w * d["x"], "n": 3})({"x": x})
    out["y"].backward()
    by_keyword = recompute(lambda *, d: w * d)(d=x)
    by_keyword.backward()

    assert out["n"] == 3
    assert w.grad == 2 + 2
    assert x.grad == 5 + 5


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    label: str = "a"


@attrs.define
class Slotted:
    inner: list
    factor: torch.Tensor


Pair = namedtuple("Pair", ["left", "right"])


def test_tensors_in_records_and_named_tuples_keep_their_gradients():
    def function(record, *, pair, options):
        assert record.label == "a"
        return record.x * pair.left.factor * pair.left.inner[0] * pair.right, options

    def run(call):
        leaves = [torch.tensor(v, requires_grad=True) for v in (2.0, 3.0, 5.0, 7.0)]
        pair = Pair(Slotted([leaves[2]], leaves[1]), leaves[3])
        value, options = call(Frozen(leaves[0]), pair=pair, options="as it is")
        value.square().backward()
        return [value.item(), options, *(leaf.grad.item() for leaf in leaves)]

    assert run(recompute(function)) == run(function)


def test_sizes_and_results_of_torch_are_handed_on_as_they_are():
    x = torch.ones(6, requires_grad=True)
    best = torch.ones(2, 3).max(dim=1)
    y = recompute(lambda x, shape, best: x.view(shape).exp() * best.values.sum())(
        x, torch.Size([2, 3]), best
    )
    y.sum().backward()
    assert torch.equal(x.grad, 2 * torch.ones(6).exp())


@pytest.mark.parametrize("name", ["use_reentrant", "debug", "context_fn", "function", "early_stop"])
def test_keywords_named_like_those_of_torch_reach_the_function(name):
    x = torch.ones(2, requires_grad=True)
    y = recompute(lambda x, **kwargs: x * kwargs[name])(x, **{name: 3})
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))


def test_containers_are_seen_as_they_were_in_the_forward():
    x = torch.ones(2, requires_grad=True)
    options = {"factor": 3.0}
    losses = []

    def function(x, options, losses):
        losses.append("once")
        return (x * options["factor"]).square()

    y = recompute(function)(x, options, losses)
    options["factor"] = 100.0
    y.sum().backward()

    assert losses == ["once"]
    assert torch.equal(x.grad, torch.full((2,), 18.0))


def test_an_argument_changed_in_place_before_backward_is_an_error():
    x = torch.ones(2, requires_grad=True)
    extra = {"bias": torch.ones(2)}

    y = recompute(lambda x, *, extra: (x + extra["bias"]).square())(x, extra=extra)
    extra["bias"].fill_(9.0)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_parameter_changed_between_forward_and_recomputation_is_an_error():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    y = recompute_all()(layers, torch.ones(1, 2, requires_grad=True))
    with torch.no_grad():
        layers[1].weight.add_(1.0)

    with pytest.raises(ReplayError, match=r"parameter 1\.weight was changed in place"):
        y.sum().backward()


def test_an_in_place_modified_view_keeps_its_gradient():
    p = torch.tensor(1.0, requires_grad=True)
    x = torch.zeros(5, requires_grad=True)

    recompute(lambda x: ((x + p)[:]).relu_())(x).sum().backward()

    assert p.grad == 5
    assert torch.equal(x.grad, torch.ones(5))


def test_dropout_of_the_global_generator_is_replayed_and_leaves_it_where_plain_would():
    def function(x):
        return nn.functional.dropout(x.square(), 0.5) * x

    def run(call):
        torch.manual_seed(11)
        x = torch.arange(1.0, 33.0, requires_grad=True)
        y = call(x)
        torch.rand(5)
        y.sum().backward()
        return [y.detach(), x.grad, torch.rand(3)]

    plain = run(function)
    replayed = run(recompute(function))
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))


def test_without_preserving_the_generator_a_drawing_layer_sees_other_numbers():
    calls = []

    def function(x):
        calls.append(float(torch.rand(())))
        return x.square() * x

    torch.manual_seed(1)
    x = torch.ones(2, requires_grad=True)
    recompute(function, preserve_rng_state=False)(x).sum().backward()

    assert len(set(calls)) == 2


def test_drawing_another_amount_than_the_forward_did_is_an_error():
    amounts = iter([1, 2])

    def function(x):
        torch.rand(next(amounts))
        return x.square()

    y = recompute(function, early_stop=False)(torch.ones(2, requires_grad=True))
    state = torch.get_rng_state()

    with pytest.raises(ReplayError, match="drew another amount"):
        y.sum().backward()
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("early_stop", "ends"), [(True, 1), (False, 2)])
def test_early_stop_leaves_what_follows_the_last_kept_tensor_undone(early_stop, ends):
    finished = []

    def function(x):
        y = x.square().exp()
        finished.append(True)
        return y

    recompute(function, early_stop=early_stop)(torch.ones(2, requires_grad=True)).sum().backward()

    assert len(finished) == ends


def test_recomputed_functions_nest():
    def run(wrap):
        x = torch.tensor([0.3, 0.7], requires_grad=True)
        inner = wrap(lambda x: torch.sin(x) * x)
        y = wrap(lambda x: inner(inner(x).exp()))(x)
        y.sum().backward()
        return y.detach(), x.grad

    plain = run(lambda function: function)
    nested = run(recompute)
    assert all(torch.equal(a, b) for a, b in zip(plain, nested, strict=True))


def test_second_derivatives_pass_through_a_recomputed_function():
    x = torch.tensor(2.0, requires_grad=True)
    y = recompute(lambda x: x**4)(x)
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (first.item(), second.item()) == (32.0, 48.0)
