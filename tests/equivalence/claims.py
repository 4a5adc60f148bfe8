"""What the law claims of a row: its three steps are the serial run's."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import torch
from torch import nn

from tests.equivalence.drawn import BEGUN, load_into_oracle, states_by_label, weights_of
from tests.equivalence.factors import Row, config_of, shape_of
from tests.equivalence.families import FAMILIES
from tests.equivalence.layout_runs import LayoutRun
from tests.optimizer_runs import ORACLES, give_gradient
from tests.serial import Gradients, Outcome, SerialRun, learning_rate
from tests.serial_narrow import NarrowSerialRun
from trainwright.integration.config import RunConfig

WIDE = {"float64": 1e-12, "float32": 1e-5}
ZERO = 1e-3
"""A gradient below this share of the largest one is held to that share of it."""

UPDATE = {"float64": 1e-12}
UPDATE_NARROW = 1e-6
"""Of an update of FP32 weights from the same gradients: a few roundings."""

APART = {"float16": 2**-10, "bfloat16": 2**-7}
APART_FLOAT8 = 2**-4
"""How far steps in few bits are at most apart; tests/test_law_dtypes.py derives them.

That is for weights near where they begin. Those drawn here are further, so that a step may be as
far from the serial one as two right ones are: each of them is as far from the exact one as rounding
takes the serial one, of which the float32 step says how far that is.
"""

OF_ROUNDING = 2.0
OF_ROUNDED_CHOICES = 8.0
"""With experts, too: the few tokens that rounding sends elsewhere are more or fewer by chance.

Of some twenty rows the furthest was at 4.4; in float64, where nothing is sent elsewhere, that one
is exact.
"""

COMPRESSED = 2**-9
"""Half of what rounding to bfloat16 may change of the largest value of a block."""


def serial_run(row: Row) -> SerialRun:
    """Return the serial run of a row, whose weights are yet to be given."""
    config = config_of(row)
    shape = shape_of(row, config)
    if config.dtype in WIDE:
        return SerialRun(shape, config.evolve(microbatches=1))
    scale = config.scaling.initial_scale if config.dtype == "float16" else 1.0
    return NarrowSerialRun(shape, config, scale)


def first_weights(serial: SerialRun) -> dict[str, torch.Tensor]:
    """Return the weights that a row begins with, at least in float32."""
    masters = getattr(serial, "masters", serial.named)
    return weights_of(masters)


def assert_is_serial(
    row: Row, serial: SerialRun, before: Mapping[str, torch.Tensor], run: LayoutRun
) -> None:
    """Check each step against the serial run, which begins it where the layout does."""
    config = config_of(row)
    update = UPDATE.get(config.dtype, UPDATE_NARROW)
    exact = SerialRun(shape_of(row, config), _in_float32(config)) if is_rounded(row) else None
    plain = {name: nn.Parameter(weight.clone()) for name, weight in before.items()}
    optimizers = ORACLES[row["optimizer"]](plain)
    load_into_oracle(optimizers, plain)
    for number, found in enumerate(run.steps):
        step = BEGUN + number
        serial.take(before, step)
        right = serial.gradients()
        own = 0.0
        if exact is not None:
            exact.take(before, step)
            own = share_apart(right.gradients, exact.gradients().gradients)
        assert_same_gradients(bound_of(row, own), right, found)
        _assert_same_scales(row, serial, run, number)
        assert math.isclose(run.rates[number], learning_rate(config, step), rel_tol=1e-12)
        _update(optimizers, plain, before, found, run.rates[number])
        for name, parameter in plain.items():
            _assert_close(f"update {number} of {name}", found.weights[name], parameter, update)
        before = found.weights
    kept = {
        (label, key): value
        for label, (_, state) in states_by_label(optimizers, plain).items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    }
    assert run.states.keys() == kept.keys()
    for name, state in kept.items():
        _assert_close(f"{name[1]} of {name[0]}", run.states[name], state, update)


def assert_same_gradients(bound: Bound, right: Gradients, found: Outcome) -> None:
    """Check loss, norm and gradients of one step."""
    assert found.gradients.keys() == right.gradients.keys()
    assert math.isclose(found.loss, right.loss, rel_tol=bound.loss), (found.loss, right.loss)
    assert math.isclose(found.norm, right.norm, rel_tol=bound.norm), (found.norm, right.norm)
    if bound.together is not None:
        apart = share_apart(found.gradients, right.gradients)
        assert apart <= bound.together, f"{apart:.1e} apart, at most {bound.together:.1e}"
        return
    largest = max(float(gradient.abs().max()) for gradient in right.gradients.values())
    for name, gradient in right.gradients.items():
        size = max(float(gradient.abs().max()), ZERO * largest)
        apart = float((found.gradients[name] - gradient).abs().max()) / size
        assert apart <= bound.each, f"gradient of {name}: {apart:.1e} apart"


@attrs.frozen
class Bound:
    """How far a step may be from the serial one.

    Args:
        loss: relative.
        norm: relative.
        each: each gradient, of its largest magnitude.
        together: all gradients, of their norm; then ``each`` says nothing.
    """

    loss: float
    norm: float
    each: float
    together: float | None = None


def bound_of(row: Row, own: float) -> Bound:
    """Return how far a row's steps may be from the serial ones, which are so far from float32."""
    dtype, compressed = row["dtype"], row["recompute"].endswith("+bf16")
    if dtype in WIDE:
        exact = WIDE[dtype]
        return Bound(exact, COMPRESSED, 0.0, COMPRESSED) if compressed else Bound(*[exact] * 3)
    together = COMPRESSED if compressed else 0.0
    if is_rounded(row):
        share = OF_ROUNDED_CHOICES if FAMILIES[row["family"]].experts else OF_ROUNDING
        together = max(APART.get(dtype, APART_FLOAT8), share * own, together)
    if together:
        return Bound(max(together / 8, 1e-6), together, 0.0, together)
    # The sums over microbatches and ranks are in another order: float32 rounding.
    return Bound(1e-6, 1e-6, 1e-5)


def is_rounded(row: Row) -> bool:
    """Whether ranks round what the serial run does not, in few bits: terms before their sum.

    Experts, who are handed rows of several sequences, round sums over these.
    """
    shared = any(row[axis] != "1" for axis in ("tp", "cp", "ep"))
    return row["dtype"] not in WIDE and (shared or FAMILIES[row["family"]].experts is not None)


def share_apart(found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of all differences as a share of the norm of all that is right."""
    errors = [found[name] - gradient for name, gradient in right.items()]
    whole = torch.nn.utils.get_total_norm(list(right.values()))
    return float(torch.nn.utils.get_total_norm(errors) / whole)


def _in_float32(config: RunConfig) -> RunConfig:
    plain = {"initial_scale": 2.0**16} if config.dtype == "float16" else {}
    return config.evolve(dtype="float32", microbatches=1, **plain)


def _assert_same_scales(row: Row, serial: SerialRun, run: LayoutRun, number: int) -> None:
    state = getattr(serial, "scales", None)
    right = {} if state is None else state.scales()
    found = run.scales[number]
    assert found.keys() == right.keys()
    exact = not is_rounded(row) and not row["recompute"].endswith("+bf16")
    for name, scale in right.items():
        if exact or name.endswith(".weight"):
            assert torch.equal(found[name], scale), name
        else:
            # The largest of many elements is one element, which moves with its code.
            assert math.isclose(found[name], scale, rel_tol=0.5), name


def _update(
    optimizers: list[torch.optim.Optimizer],
    plain: Mapping[str, nn.Parameter],
    before: Mapping[str, torch.Tensor],
    found: Outcome,
    lr: float,
) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
    with torch.no_grad():
        for name, parameter in plain.items():
            parameter.copy_(before[name])
    for name, parameter in plain.items():
        give_gradient(parameter, found.gradients[name])
    for optimizer in optimizers:
        optimizer.step()


def _assert_close(what: str, found: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    right = right.detach()
    apart = float((found - right).abs().max()) / max(float(right.abs().max()), 1e-300)
    assert apart <= tolerance, f"{what}: {apart:.1e} apart"
