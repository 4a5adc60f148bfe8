"""Names of the same memory, as those of tied weights: stored once, and restored under any name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .tree import TensorLeaf


def find_aliases(leaves: Iterable[TensorLeaf]) -> dict[str, str]:
    """Return which tensors are the same as another one, by path: the first path of them all.

    The same are those that begin at one place in memory, with equal dtype, shape, strides and part
    of the whole; their first path is the least, not that which comes first in the tree.
    """
    groups: dict[Any, list[str]] = {}
    for leaf in leaves:
        if leaf.spec.numel > 0:  # without elements there is no memory
            groups.setdefault(_identity(leaf), []).append(leaf.path)
    return {
        path: min(paths)
        for paths in groups.values()
        if len(paths) > 1
        for path in paths
        if path != min(paths)
    }


def _identity(leaf: TensorLeaf) -> Any:
    tensor, spec = leaf.tensor, leaf.spec
    memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    part = (spec.global_shape, spec.boxes, spec.start, spec.stop, frozenset(spec.replicated))
    return (*memory, tensor.is_conj(), tensor.is_neg(), leaf.everywhere, part)
