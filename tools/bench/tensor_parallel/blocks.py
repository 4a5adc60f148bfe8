"""The contestants of the blocks: one process, torch's parallelize_module, trainwright.sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tools.bench.tensor_parallel.block import Shape, build_stack, draw_inputs
from trainwright.collectives import Communicator
from trainwright.sharding import Mesh, MeshShape
from trainwright.sharding.placement.parameters import placements_of, shard_spec
from trainwright.sharding.tensor.parallelize import parallelize
from trainwright.sharding.tensor.sequence import SequenceSharding
from trainwright.sharding.tensor.styles import (
    Column,
    Enter,
    JoinSequence,
    Norm,
    Plan,
    Row,
    SplitSequence,
)

_COLUMNS = (
    "layers.*.attention.q",
    "layers.*.attention.k",
    "layers.*.attention.v",
    "layers.*.feed.gate",
    "layers.*.feed.up",
)
_ROWS = ("layers.*.attention.out", "layers.*.feed.down")
_NORMS = ("layers.*.attention_norm", "layers.*.feed_norm")
_INSIDES = ("layers.*.attention", "layers.*.feed")
_SEQUENCE = 1


class Single:
    """All of it in one process; each rank computes it for itself."""

    def __init__(self, shape: Shape) -> None:
        self.module: nn.Module = build_stack(shape)
        self.hidden, self.upstream = draw_inputs(shape)
        self.output = self.hidden

    def step(self) -> None:
        """Run forward and backward once."""
        self.module.zero_grad()
        hidden = self.hidden.detach().requires_grad_()
        self.output = self.module(hidden)
        torch.autograd.backward(self.output, self.upstream)
        self.input_gradient = hidden.grad

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return the output, the gradient of the input and those of the parameters."""
        assert self.input_gradient is not None
        parameters = self.module.named_parameters()
        gradients = {name: p.grad for name, p in parameters if p.grad is not None}
        return {"output": self.output.detach(), "input": self.input_gradient, **gradients}

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return all of it."""
        return whole


class _Torch(Single):
    """PyTorch's plan, as torchtitan has it: one entrance for all products of a normed input."""

    def __init__(self, world: Communicator, shape: Shape, *, cuts_sequence: bool) -> None:
        super().__init__(shape)
        outside = Shard(_SEQUENCE) if cuts_sequence else Replicate()
        plan: dict[str, ParallelStyle] = {}
        for name in _INSIDES:
            plan[name] = PrepareModuleInput(
                input_layouts=(outside,), desired_input_layouts=(Replicate(),)
            )
        plan.update({name: ColwiseParallel() for name in _COLUMNS})
        plan.update({name: RowwiseParallel(output_layouts=outside) for name in _ROWS})
        if cuts_sequence:
            plan.update({name: SequenceParallel() for name in _NORMS})
            plan["first"] = PrepareModuleInput(
                input_layouts=(Replicate(),),
                desired_input_layouts=(outside,),
                use_local_output=True,
            )
            plan["last"] = PrepareModuleOutput(
                output_layouts=(outside,), desired_output_layouts=(Replicate(),)
            )
        mesh = init_device_mesh("cpu", (world.size,))
        self.module = parallelize_module(self.module, mesh, plan)

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return whole gradients, and the output as it is."""
        return {
            name: found.full_tensor() if isinstance(found, DTensor) else found
            for name, found in super().results().items()
        }


class _Ours(Single):
    """`parallelize` with the plan that says the same."""

    def __init__(
        self, world: Communicator, shape: Shape, sequence: SequenceSharding | None
    ) -> None:
        super().__init__(shape)
        self._world = world
        self._mesh = Mesh(world, MeshShape(tp=world.size))
        plan: Plan = {
            **dict.fromkeys(_INSIDES, Enter()),
            **dict.fromkeys(_COLUMNS, Column()),
            **dict.fromkeys(_ROWS, Row()),
            **dict.fromkeys(_NORMS, Norm()),
        }
        if sequence is not None:
            plan = {**plan, "first": SplitSequence(), "last": JoinSequence()}
        self.module = parallelize(self.module, plan, self._mesh, sequence=sequence)

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's parts; the gradients that are terms of a sum are summed here."""
        found = dict(super().results())
        for name, placement in placements_of(self.module).items():
            if "tp" in placement.reduction_axes:
                found[name] = found[name].clone()
                self._world.all_reduce(found[name]).wait()
        return found

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part."""
        if name in ("output", "input"):
            return whole
        spec = shard_spec(name, placements_of(self.module)[name], self._mesh)
        return spec.extract(whole)


def builders() -> dict[str, Callable[[Shape, Communicator], Single]]:
    """Return how to build each contestant on the ranks of a communicator, by name."""
    whole, shards = SequenceSharding.keeping_whole, SequenceSharding.keeping_shards
    return {
        "single": lambda shape, world: Single(shape),
        "torch": lambda shape, world: _Torch(world, shape, cuts_sequence=False),
        "ours": lambda shape, world: _Ours(world, shape, None),
        "torch_sequence": lambda shape, world: _Torch(world, shape, cuts_sequence=True),
        "ours_sequence": lambda shape, world: _Ours(world, shape, whole(_SEQUENCE)),
        "ours_shards": lambda shape, world: _Ours(world, shape, shards(_SEQUENCE)),
    }
