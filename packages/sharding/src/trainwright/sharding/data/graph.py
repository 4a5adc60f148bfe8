"""What autograd will run before anything else of a module's backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from trainwright.sharding.data.errors import LifecycleError


def next_number() -> int:
    """Return the number that autograd gives to the next node that this thread makes.

    Of the nodes that are ready to run the engine takes the one with the largest number, and nodes
    get their numbers as they are made. So when a node runs, all those that were made later in the
    same thread, and will run at all, have run.
    """
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def nodes_since(start: int, *values: object) -> list[Node]:
    """Return the nodes made since ``start`` that the tensors in some values come from.

    An in-place operation on a view rewrites the history of the tensor it is a view of, and leaves
    out the view's own node: so both are returned.
    """
    found: dict[Node, None] = {}
    for tensor in tensors_in(*values):
        for origin in (tensor, tensor._base):
            node = None if origin is None else origin.grad_fn
            if node is not None and number_of(node) >= start:
                found[node] = None
    return list(found)


def number_of(node: Node) -> int:
    """Return when a node was made, see `next_number`."""
    number: int = node._sequence_nr()
    return number


def tensors_in(*values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers, also in objects that hold them as attributes."""
    stack = list(values)
    seen: set[int] = set()
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            yield value
            continue
        if value is None or isinstance(value, str | bytes | int | float | nn.Module | type):
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            stack.extend(value)
        else:
            stack.extend(vars(value).values() if hasattr(value, "__dict__") else ())
            names = getattr(type(value), "__slots__", ())
            names = (names,) if isinstance(names, str) else names
            stack.extend(getattr(value, name, None) for name in names)


def copy_aliases(output: Any, weights: Iterable[torch.Tensor], name: str) -> Any:
    """Return a unit's output with copies of the tensors that share memory with its weights.

    Such a tensor would lose its contents when the weights are released.

    Raises:
        LifecycleError: One stands in a container that cannot be rebuilt.
    """
    tensors = [tensor for tensor in tensors_in(output) if tensor.layout is torch.strided]
    if not tensors:
        return output
    storages = {weight.untyped_storage()._cdata for weight in weights}

    def is_alias(value: object) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and value.untyped_storage()._cdata in storages
        )

    def copy(value: Any) -> Any:
        return value.clone() if is_alias(value) else value

    if not any(is_alias(tensor) for tensor in tensors):
        return output
    copied = pytree.tree_map(copy, output)
    if any(is_alias(tensor) for tensor in tensors_in(copied)):
        raise LifecycleError(
            f"unit {name!r} returns a view of its weights inside of a {type(output).__name__}, "
            "which is empty once they are released; return a copy (.clone())"
        )
    return copied
