"""The state that is saved: bfloat16 weights and two float32 moments, cut over the ranks or whole.

# Shapes: D width; of each layer four matrices [D, D] are sharded, three along rows and one along
# columns, and eight vectors [D] are replicated; of the two embeddings [D, D] one is replicated.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import attrs
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainwright.checkpointing import Sharded
from trainwright.collectives import Box, ShardSpec

LAYERS = 6
_BYTES_OF_ELEMENT = 2 + 4 + 4
_DTYPES = {"weight": torch.bfloat16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


@attrs.frozen
class Part:
    """What this rank holds of one tensor: all of it, or its slice along ``dim``."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dim: int | None


def width_of(gib: float, ranks: int) -> int:
    """Return the width at which the state has about so many GiB."""
    matrices = 4 * LAYERS + 2
    width = math.sqrt(gib * 2**30 / _BYTES_OF_ELEMENT / matrices)
    return max(1, round(width / ranks)) * ranks


def make_state(width: int, rank: int, ranks: int) -> dict[str, Part]:
    """Return this rank's parts; every element of every tensor is another one."""
    state: dict[str, Part] = {}
    square = (width, width)
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
        "embedding": (square, 0),
        "positions": (square, None),
    }
    for layer in range(LAYERS):
        for name in ("qkv", "up", "gate", "down"):
            shapes[f"layer{layer}.{name}"] = (square, 1 if name == "down" else 0)
        for number in range(8):
            shapes[f"layer{layer}.norm{number}"] = ((width,), None)
    for kind, dtype in _DTYPES.items():
        for name, (shape, dim) in shapes.items():
            local = list(shape)
            if dim is not None:
                local[dim] //= ranks
            seed = zlib.crc32(f"{kind}.{name}".encode())
            generator = torch.Generator().manual_seed(seed + (0 if dim is None else rank))
            tensor = torch.empty(local, dtype=dtype).normal_(generator=generator)
            state[f"{kind}.{name}"] = Part(tensor, shape, dim)
    return state


def empty_like(state: Mapping[str, Part]) -> dict[str, Part]:
    """Return the same parts full of zeros, in memory that has been touched."""
    return {
        name: attrs.evolve(part, tensor=torch.zeros_like(part.tensor).clone())
        for name, part in state.items()
    }


def num_bytes(state: Mapping[str, Part]) -> int:
    """Return the bytes of all whole tensors."""
    return sum(math.prod(part.shape) * part.tensor.itemsize for part in state.values())


def largest_part(state: Mapping[str, Part]) -> int:
    """Return the bytes of the largest tensor of this rank."""
    return max(part.tensor.nbytes for part in state.values())


def tree_of(state: Mapping[str, Part], rank: int) -> dict[str, Sharded | torch.Tensor]:
    """Return the state as `StateStore` takes it."""
    tree: dict[str, Sharded | torch.Tensor] = {}
    for name, part in state.items():
        tree[name] = part.tensor
        if part.dim is not None:
            start, stop = [0] * len(part.shape), list(part.shape)
            start[part.dim] = part.tensor.shape[part.dim] * rank
            stop[part.dim] = start[part.dim] + part.tensor.shape[part.dim]
            spec = ShardSpec.of_boxes(name, part.shape, [Box(start, stop)])
            tree[name] = Sharded(part.tensor, spec)
    return tree


def dtensors_of(state: Mapping[str, Part], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Return the state as torch.distributed.checkpoint takes it."""
    return {
        name: part.tensor
        if part.dim is None
        else DTensor.from_local(part.tensor, mesh, [Shard(part.dim)], run_check=False)
        for name, part in state.items()
    }
