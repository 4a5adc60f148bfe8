"""Measures what layers and operators cost: time, and the distinct storages that autograd saves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from trainwright.checkpointing.activations.arguments import take_apart
from trainwright.checkpointing.errors import PlanError

from .choices import Choice
from .costs import ChainCosts, Costs, LayerCost
from .profile_operators import profile_operators


def profile(
    module: nn.Module | Iterable[nn.Module],
    sample: Any,
    *args: Any,
    repeats: int = 5,
    choices: Sequence[Choice] = (),
    **kwargs: Any,
) -> Costs:
    """Measure ``module`` on a sample: layer by layer if it is a stack, else operator by operator.

    Gradients, buffers and PyTorch's global generators are as before afterwards. A layer whose
    second run differs from its first, from the same buffers and the same position of the global
    generators, is marked as one that cannot be recomputed; of operators, all that draw randomly or
    change what lives outside. Times are medians; temporaries are not measured.

    Args:
        module: An `nn.Sequential`, an `nn.ModuleList` or layers, each called as
            ``layer(hidden, *args, **kwargs)``; or another module.
        sample: The input, as in training: of its shape, dtype and device, requiring a gradient or
            not. Tensors in the other arguments count as living on anyway.
        repeats: Timed runs, after one that is not timed.
        choices: Handed on to the costs.

    Returns:
        `ChainCosts` or `OperatorCosts`.

    Raises:
        PlanError: There is no layer, or ``repeats`` is less than 1.
    """
    if type(repeats) is not int or repeats < 1:
        raise PlanError(f"repeats must be a whole number, at least 1, got {repeats!r}")
    if isinstance(module, nn.Module) and not isinstance(module, (nn.Sequential, nn.ModuleList)):
        with _undisturbed([module], sample), torch.enable_grad():
            return profile_operators(module, (sample, *args), kwargs, repeats, choices)
    layers = list(module)
    costs: list[LayerCost] = []
    hidden = sample
    input_bytes = sum(_storages(_tensors(sample)).values())
    with _undisturbed(layers, sample), torch.enable_grad():
        for number, layer in enumerate(layers):
            name = f"{number} {type(layer).__name__}"
            cost, hidden = _profile_layer(layer, name, hidden, (args, kwargs), repeats)
            costs.append(cost)
    return ChainCosts(costs, input_bytes, choices)


def _profile_layer(
    layer: nn.Module, name: str, hidden: Any, others: tuple[Any, Any], repeats: int
) -> tuple[LayerCost, Any]:
    args, kwargs = others

    def call(given: Any) -> Any:
        return layer(given, *args, **kwargs)

    hidden = _as_leaves(hidden)
    outside = [*layer.parameters(), *layer.buffers(), *_tensors(others)]
    saved, output = _saved_storages(call, hidden, outside)
    entering, leaving = _storages(_tensors(hidden)), _storages(_tensors(output))
    inner = {key: size for key, (size, _) in saved.items() if key not in entering}
    able = sum(size for key, (size, floats) in saved.items() if floats and key not in entering)
    own = {key: size for key, size in leaving.items() if key not in entering}
    output_saved = any(key in inner for key in own)
    if output_saved:
        inner |= own
    repeatable = _repeats(call, layer, hidden, output)
    forward_s, backward_s = _time(call, layer, hidden, repeats)
    cost = LayerCost(
        name,
        forward_s,
        backward_s,
        sum(leaving.values()),
        sum(inner.values()),
        output_saved=output_saved,
        input_saved=any(key in saved for key in entering),
        recomputable=repeatable,
        compressible_bytes=able,
    )
    return cost, output


def _saved_storages(
    call: Callable[[Any], Any], hidden: Any, outside: list[torch.Tensor]
) -> tuple[dict[int, tuple[int, bool]], Any]:
    """Return size and whether it is floating point of each storage saved, and the output."""
    kept: list[torch.Tensor] = []  # so that no address is used twice
    skipped = set(_storages(outside))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = call(hidden)
    found: dict[int, tuple[int, bool]] = {}
    for tensor in kept:
        for key, size in _storages([tensor]).items():
            if key not in skipped:
                found[key] = size, tensor.dtype.is_floating_point
    return found, output


def _repeats(call: Callable[[Any], Any], layer: nn.Module, hidden: Any, output: Any) -> bool:
    """Whether the layer gives the same twice in a row, from one state."""
    with _undisturbed([layer], hidden):
        first = _tensors(call(hidden))
    with _undisturbed([layer], hidden):
        second = _tensors(call(hidden))
    return len(first) == len(second) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(first, second, strict=True)
    )


def _time(
    call: Callable[[Any], Any], layer: nn.Module, hidden: Any, repeats: int
) -> tuple[float, float]:
    wanted = [p for p in [*layer.parameters(), *_tensors(hidden)] if p.requires_grad]
    forwards, backwards = [], []
    for number in range(repeats + 1):
        start = _now(hidden)
        outputs = [t for t in _tensors(call(hidden)) if t.requires_grad]
        middle = _now(hidden)
        gradients = [torch.ones_like(t) for t in outputs]
        begin = _now(hidden)
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        end = _now(hidden)
        if number:
            forwards.append(middle - start)
            backwards.append(end - begin)
    return statistics.median(forwards), statistics.median(backwards)


@contextmanager
def _undisturbed(layers: list[nn.Module], sample: Any) -> Iterator[None]:
    """Bring buffers and the global generators back as they were."""
    buffers = [buffer for layer in layers for buffer in layer.buffers()]
    before = [buffer.detach().clone() for buffer in buffers]
    devices = {t.device for t in _tensors(sample) if t.device.type != "cpu"}
    states = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for device, state in states:
                torch.get_device_module(device).set_rng_state(state, device)
            with torch.no_grad():
                for buffer, old in zip(buffers, before, strict=True):
                    if not torch.equal(buffer, old):
                        buffer.copy_(old)


def _as_leaves(value: Any) -> Any:
    """Return the value with its tensors cut from their graph, requiring gradients as before."""
    tensors: list[torch.Tensor] = []
    build = take_apart(value, tensors)
    return build([t.detach().requires_grad_(t.requires_grad) for t in tensors])


def _tensors(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    take_apart(value, tensors)
    return tensors


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the size of each distinct storage by its address in the process."""
    storages = [t.untyped_storage() for t in tensors if t.layout == torch.strided]
    return {storage._cdata: storage.nbytes() for storage in storages}


def _now(sample: Any) -> float:
    for device in {t.device for t in _tensors(sample) if t.device.type not in ("cpu", "meta")}:
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()
