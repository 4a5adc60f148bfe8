"""The laws of `LayerRunner`, which every activation policy must hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn

from trainwright.checkpointing.protocol import LayerRunner

# Shapes: B batch, D model.


class SampleLayer(nn.Module):
    """A residual layer with dropout, a keyword, and a bias taken from a dictionary.

    Args:
        dim: Size of the last dimension.
        dropout: Probability of dropping, drawn from PyTorch's global generator.
    """

    def __init__(self, dim: int, dropout: float = 0.25) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, hidden_BD: torch.Tensor, extra: dict[str, torch.Tensor], *, scale: torch.Tensor
    ) -> torch.Tensor:
        """Return the layer's output, of the shape of its input."""
        inner = torch.nn.functional.gelu(self.up(self.norm(hidden_BD)) * scale)
        dropped: torch.Tensor = self.dropout(self.down(inner))
        return hidden_BD + dropped + extra["bias"]


@attrs.frozen(eq=False)
class _Trace:
    """All that a run of some micro-batches leaves behind."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    generator: torch.Tensor


def law_outputs_and_gradients_are_bitwise_those_of_keeping_all(
    runner: LayerRunner, num_layers: int, seed: int
) -> None:
    """Nothing that training sees depends on the policy."""
    plain = _run(_keep, num_layers, seed, order=[0])
    policy = _run(runner, num_layers, seed, order=[0])
    _claim_equal(plain, policy)


def law_microbatches_in_flight_do_not_mix(runner: LayerRunner, num_layers: int, seed: int) -> None:
    """Three forwards, then their backwards in any order."""
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed)).tolist()
    plain = _run(_keep, num_layers, seed, order=order)
    policy = _run(runner, num_layers, seed, order=order)
    _claim_equal(plain, policy)


def law_frozen_layers_stay_frozen(runner: LayerRunner, num_layers: int, seed: int) -> None:
    """Parameters that need no gradient get none, the others all of theirs."""
    plain = _run(_keep, num_layers, seed, order=[0], frozen=True)
    policy = _run(runner, num_layers, seed, order=[0], frozen=True)
    _claim_equal(plain, policy)


def law_autocast_is_that_of_the_forward(runner: LayerRunner, num_layers: int, seed: int) -> None:
    """The backward is called outside of the autocast block, and computes as within."""
    plain = _run(_keep, num_layers, seed, order=[0, 1], autocast=True)
    policy = _run(runner, num_layers, seed, order=[0, 1], autocast=True)
    _claim_equal(plain, policy)


def law_modules_are_left_as_they_are(runner: LayerRunner, num_layers: int, seed: int) -> None:
    """No parameter gets another name or place, no hook stays behind."""
    layers = _make_layers(num_layers, seed)
    before = [(name, id(parameter)) for name, parameter in layers.named_parameters()]
    kinds = [type(layer) for layer in layers]

    runner(layers, torch.ones(2, 4), {"bias": torch.zeros(4)}, scale=torch.ones(()))

    assert [(name, id(parameter)) for name, parameter in layers.named_parameters()] == before
    assert [type(layer) for layer in layers] == kinds
    assert not any(module._forward_hooks for module in layers.modules())


LAYER_RUNNER_LAWS: tuple[Callable[[LayerRunner, int, int], None], ...] = (
    law_outputs_and_gradients_are_bitwise_those_of_keeping_all,
    law_microbatches_in_flight_do_not_mix,
    law_frozen_layers_stay_frozen,
    law_autocast_is_that_of_the_forward,
    law_modules_are_left_as_they_are,
)


def live_saved_bytes(forward: Callable[[], Any], parameters: Any) -> int:
    """Return the bytes of the distinct storages that autograd keeps after ``forward()``.

    Args:
        forward: Runs the model; what it returns is held until the bytes are counted.
        parameters: Tensors whose storages do not count, since they live on anyway.
    """
    storages: dict[int, int] = {}
    skipped = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: list[torch.Tensor] = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.append(tensor)
        if storage.data_ptr() not in skipped:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    total = sum(storages.values())
    del output
    return total


def _keep(layers: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
    for layer in layers:
        hidden = layer(hidden, *args, **kwargs)
    return hidden


def _make_layers(num_layers: int, seed: int) -> nn.ModuleList:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.ModuleList([SampleLayer(4) for _ in range(num_layers)])


def _run(
    runner: LayerRunner,
    num_layers: int,
    seed: int,
    *,
    order: list[int],
    frozen: bool = False,
    autocast: bool = False,
) -> _Trace:
    layers = _make_layers(num_layers, seed)
    if frozen:
        for number, layer in enumerate(layers):
            layer.requires_grad_(number % 2 == 1)
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(3, 4, generator=generator) for _ in order]
    bias = torch.randn(4, generator=generator).requires_grad_()
    scale = torch.rand((), generator=generator).requires_grad_()
    if not frozen:
        inputs = [tensor.requires_grad_() for tensor in inputs]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = [runner(layers, x, {"bias": bias}, scale=scale) for x in inputs]
        for position in order:
            outputs[position].float().square().sum().backward()
            torch.rand(1)  # what others draw between backwards stays in step
        state = torch.get_rng_state()
    leaves = [*layers.named_parameters(), ("bias", bias), ("scale", scale)]
    leaves += [(f"input {number}", tensor) for number, tensor in enumerate(inputs)]
    return _Trace(
        [output.detach() for output in outputs], {name: x.grad for name, x in leaves}, state
    )


def _claim_equal(plain: _Trace, policy: _Trace) -> None:
    for expected, found in zip(plain.outputs, policy.outputs, strict=True):
        assert torch.equal(expected, found), "outputs differ from keeping all"
    for name, gradient in plain.gradients.items():
        other = policy.gradients[name]
        if gradient is None:
            assert other is None, f"{name} has a gradient that keeping all does not give"
        else:
            assert other is not None, f"{name} got no gradient"
            assert torch.equal(gradient, other), f"the gradient of {name} differs"
    assert torch.equal(plain.generator, policy.generator), "the global generator moved differently"
