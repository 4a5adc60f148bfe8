"""Drawn models, a serial trainer to compare with, and a communicator that remembers its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, SingleCommunicator, empty_on
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.parallel import data_parallel
from trainwright.sharding.data.policy import ShardPolicy
from trainwright.sharding.mesh import Mesh, MeshShape
from trainwright.sharding.placement import ParameterPlacement

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LossOfMicrobatch = Callable[[nn.Module, int], torch.Tensor]


@attrs.frozen
class NetworkPlan:
    """A small model with the parameters that flat buffers find hard.

    Args:
        inputs: Width of the input.
        hidden: Width of the hidden layers.
        depth: Number of hidden layers, each of which a forward may skip.
        outputs: Width of the output.
        tied: Whether the last hidden layer's weight is the first one's.
        frozen: Whether the first layer is not trained.
        scalar: Whether the output is scaled by a 0-d parameter.
        unused: Whether there is a parameter that no forward uses.
        empty: Whether there is a parameter without elements.
        dtype: Dtype of all parameters.
    """

    inputs: int = 3
    hidden: int = 5
    depth: int = 2
    outputs: int = 2
    tied: bool = False
    frozen: bool = False
    scalar: bool = False
    unused: bool = False
    empty: bool = False
    dtype: torch.dtype = torch.float64


class Network(nn.Module):
    """The model of a `NetworkPlan`, with the same weights wherever it is made."""

    def __init__(self, plan: NetworkPlan, seed: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(plan.inputs, plan.hidden, dtype=plan.dtype)
        self.layers = nn.ModuleList(
            nn.Linear(plan.hidden, plan.hidden, dtype=plan.dtype) for _ in range(plan.depth)
        )
        if plan.unused:
            self.unused = nn.Parameter(torch.zeros(7, dtype=plan.dtype))
        if plan.empty:
            self.empty = nn.Parameter(torch.zeros(0, 3, dtype=plan.dtype))
        if plan.scalar:
            self.scale = nn.Parameter(torch.zeros((), dtype=plan.dtype))
        self.last = nn.Linear(plan.hidden, plan.outputs, bias=False, dtype=plan.dtype)
        if plan.tied and plan.depth > 1:
            first, last = self.layers[0], self.layers[-1]
            assert isinstance(first, nn.Linear)
            assert isinstance(last, nn.Linear)
            last.weight = first.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(drawn * plan.hidden**-0.5)
        if plan.frozen:
            self.first.requires_grad_(False)

    def forward(self, inputs: torch.Tensor, skipped: frozenset[int] = frozenset()) -> torch.Tensor:
        """Run the layers that are not skipped."""
        hidden = torch.tanh(self.first(inputs))
        for index, layer in enumerate(self.layers):
            if index not in skipped:
                hidden = hidden + torch.tanh(layer(hidden))
        outputs: torch.Tensor = self.last(hidden)
        return outputs * self.scale if hasattr(self, "scale") else outputs


def network_plans(
    dtypes: Iterable[torch.dtype] = (torch.float64,),
) -> st.SearchStrategy[NetworkPlan]:
    """Draw plans with odd sizes and every kind of awkward parameter."""
    return st.builds(
        NetworkPlan,
        inputs=st.integers(1, 5),
        hidden=st.integers(1, 9),
        depth=st.integers(0, 4),
        outputs=st.integers(1, 4),
        tied=st.booleans(),
        frozen=st.booleans(),
        scalar=st.booleans(),
        unused=st.booleans(),
        empty=st.booleans(),
        dtype=st.sampled_from(list(dtypes)),
    )


class Scalars(nn.Module):
    """0-d parameters, each with the gradient that the loss multiplies it with."""

    def __init__(self, *names: str, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros((), dtype=dtype)))


def wrap(model: nn.Module, comm: Communicator | None = None, **policy: Any) -> DataParallel:
    """Make a model data-parallel over all ranks of ``comm``, or alone, without alignment.

    At stage 3 the weights are gathered, and no hooks release them.
    """
    comm = SingleCommunicator() if comm is None else comm
    mesh = Mesh(comm, MeshShape(dp=comm.size))
    return wrap_on(mesh, model, ShardPolicy(**{"alignment": 1, **policy}))


def wrap_on(
    mesh: Mesh,
    model: nn.Module,
    policy: ShardPolicy | None = None,
    placements: Mapping[str, ParameterPlacement] | None = None,
) -> DataParallel:
    """Make a model data-parallel on a mesh; at stage 3 its weights are gathered, without hooks."""
    is_cut = policy is not None and policy.stage == 3
    parallel = data_parallel(model, mesh, policy, placements, hooks=not is_cut)
    parallel.await_weights()
    return parallel


def finish(parallel: DataParallel) -> dict[str, float]:
    """Reduce, wait and return the sum of each gradient that this rank keeps."""
    parallel.reduce()
    parallel.wait()
    gradients = {name: piece.parameter.grad for name, piece in parallel.pieces.items()}
    return {name: float(g.sum()) for name, g in gradients.items() if g is not None}


class SerialTrainer:
    """One process, plain autograd: what every layout must compute.

    Gradients are summed, and weights updated, in ``master_dtype``; a parameter that no micro-batch
    used has a gradient of zero.

    Args:
        module: The plain model.
        optimizer: Makes the optimizer of the masters.
        master_dtype: At least float32.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerFactory,
        master_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.module = module
        self._trained = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter.numel() > 0
        }
        self.masters = {
            name: nn.Parameter(
                parameter.detach().to(torch.promote_types(parameter.dtype, master_dtype), copy=True)
            )
            for name, parameter in self._trained.items()
        }
        self.optimizer = optimizer(self.masters.values())

    def step(self, losses: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sum the gradients of all losses, update once and return the gradients by name."""
        sums = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        for loss in losses:
            gradients = torch.autograd.grad(loss, list(self._trained.values()), allow_unused=True)
            for total, gradient in zip(sums.values(), gradients, strict=True):
                if gradient is not None:
                    total += gradient.to(total.dtype)
        for name, master in self.masters.items():
            master.grad = sums[name]
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(self.masters[name])
        return sums

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the optimizer's tensors by parameter name."""
        return optimizer_states(self.optimizer, self.masters)


def optimizer_states(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return copies of the tensors an optimizer keeps for each named parameter."""
    return {
        name: {
            key: value.detach().clone()
            for key, value in optimizer.state[parameter].items()
            if isinstance(value, torch.Tensor)
        }
        for name, parameter in parameters.items()
    }


@attrs.frozen
class RecordedCall:
    """One collective: its name, how many elements its largest tensor has, and their dtype."""

    operation: str
    communicator: str
    numel: int
    dtype: torch.dtype


class RecordingCommunicator:
    """A communicator that writes its collectives, and those of its parts, into a list.

    Args:
        inner: Does the work.
        calls: The list, shared with what `split` returns.
    """

    def __init__(self, inner: Communicator, calls: list[RecordedCall]) -> None:
        self._inner = inner
        self._calls = calls

    def split(self, color: int | None, key: int = 0) -> RecordingCommunicator | None:
        """Split ``inner``; the part writes into the same list."""
        part = self._inner.split(color, key)
        return None if part is None else RecordingCommunicator(part, self._calls)

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return memory where ``inner`` wants it."""
        return empty_on(self._inner, shape, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
            return value

        def call(*tensors: Any, **options: Any) -> Any:
            largest = max(
                (tensor for tensor in tensors if isinstance(tensor, torch.Tensor)),
                key=torch.Tensor.numel,
            )
            self._calls.append(RecordedCall(name, self._inner.name, largest.numel(), largest.dtype))
            return value(*tensors, **options)

        return call
